"""Aggregators of the VTM: each against its formula, written out position by position, and in the network."""

import math
from pathlib import Path

import pytest
import torch

import vat
from small import episode, small
from vat.ablation import load_plan
from vat.aggregation.memory import BLOCK_MEMORY, memory_estimate
from vat.aggregation.vtm import AGGREGATORS, AggregatorSpec, build_aggregator
from vat.config import LevelConfig, VATConfig

SPEC = AggregatorSpec(dim=8, heads=2, window=2, depth=2, mlp_ratio=2.0, query_grid=2, support_grid=3)
COMPONENTS = load_plan(Path(__file__).parent.parent / "configs/ablations/components.yaml", base="synthetic")
NAMES = ("transformer", "linear", "fastformer", "mixer", "centerpivot", "hsnet_mix")


def build(name, spec=SPEC):
    torch.manual_seed(0)
    module = build_aggregator(name, spec).double()
    with torch.no_grad():
        for parameter in module.parameters():  # new norms are the identity, which would hide errors
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def tokens_of(spec=SPEC, batch=2):
    q, s = spec.query_grid, spec.support_grid
    return torch.randn(batch, q, q, s, s, spec.dim, generator=torch.Generator().manual_seed(1)).double()


# -- the formulas --------------------------------------------------------------------------------------------


def norm(x, layer):
    """LayerNorm of [N, D]."""
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt() * layer.weight + layer.bias


def mlp(x, layers):
    hidden = x @ layers.fc1.weight.T + layers.fc1.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ layers.fc2.weight.T + layers.fc2.bias


def projected(x, mixer, heads):
    """q, k, v of [N, D], a list of [N, d] by head each."""
    weights, biases = mixer.qkv.weight.chunk(3), mixer.qkv.bias.chunk(3)
    return [(x @ w.T + b).chunk(heads, dim=1) for w, b in zip(weights, biases, strict=True)]


def pairwise(weight):
    """A mixer whose output is the mean of all values under weight(q_i, k_j)."""

    def mix(x, mixer, heads):
        columns = []
        for q, k, v in zip(*projected(x, mixer, heads), strict=True):
            rows = []
            for query in q:
                weights = torch.stack([weight(query, key) for key in k])
                rows.append((weights[:, None] * v).sum(0) / weights.sum())
            columns.append(torch.stack(rows))
        return torch.cat(columns, dim=1) @ mixer.proj.weight.T + mixer.proj.bias

    return mix


def phi(x):
    return torch.where(x > 0, x + 1, x.exp())


def additive(x, mixer, heads):
    columns, queries = [], []
    for head, (q, k, v) in enumerate(zip(*projected(x, mixer, heads), strict=True)):
        scale = math.sqrt(q.shape[1])
        alpha = torch.stack([(mixer.query_weight[head] @ row / scale).exp() for row in q])
        global_query = sum(a * row for a, row in zip(alpha / alpha.sum(), q, strict=True))
        p = [global_query * row for row in k]
        beta = torch.stack([(mixer.key_weight[head] @ row / scale).exp() for row in p])
        global_key = sum(b * row for b, row in zip(beta / beta.sum(), p, strict=True))
        columns.append(torch.stack([global_key * row for row in v]))
        queries.append(q)
    return torch.cat(columns, 1) @ mixer.proj.weight.T + mixer.proj.bias + torch.cat(queries, 1)


def along_tokens(x, mixer, heads):
    return torch.stack([mlp(x[:, channel], mixer.mlp) for channel in range(x.shape[1])], dim=1)


FORMULAS = {
    "transformer": pairwise(lambda q, k: (q @ k / math.sqrt(len(q))).exp()),
    "linear": pairwise(lambda q, k: phi(q) @ phi(k)),
    "fastformer": additive,
    "mixer": along_tokens,
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", FORMULAS)
def test_blocks_follow_their_formula(name, fast):
    module, tokens = build(name), tokens_of()
    for part in module.modules():
        part.fast = fast
    expected = []
    for x in tokens.flatten(1, 4):
        for block in module.blocks:
            x = x + FORMULAS[name](norm(x, block.norm1), block.attn, SPEC.heads)
            x = x + mlp(norm(x, block.norm2), block.mlp)
        expected.append(x)
    torch.testing.assert_close(module(tokens), torch.stack(expected).view(tokens.shape))


def pivot(x, unit, groups):
    """One center-pivot unit on [Hq, Wq, Hs, Ws, C], tap by tap."""
    y = torch.zeros_like(x) + unit.query_conv.bias + unit.support_conv.bias
    hq, wq, hs, ws, channels = x.shape
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            convs = (unit.query_conv, unit.support_conv)
            query_tap, support_tap = (conv.weight[:, :, dy + 1, dx + 1].T for conv in convs)
            for i in range(hq):
                for j in range(wq):
                    if 0 <= i + dy < hq and 0 <= j + dx < wq:
                        y[i, j] += x[i + dy, j + dx] @ query_tap
            for i in range(hs):
                for j in range(ws):
                    if 0 <= i + dy < hs and 0 <= j + dx < ws:
                        y[:, :, i, j] += x[:, :, i + dy, j + dx] @ support_tap
    for members in torch.arange(channels).chunk(groups):
        part = y[..., members]
        y[..., members] = (part - part.mean()) / (part.var(unbiased=False) + 1e-5).sqrt()
    return (y * unit.norm.weight + unit.norm.bias).relu()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("name", "dim", "groups"), [("centerpivot", 32, 2), ("hsnet_mix", 8, 4)])
def test_center_pivot_units_follow_their_formula(name, dim, groups, fast):
    spec = AggregatorSpec(dim, heads=1, window=2, depth=2, mlp_ratio=2.0, query_grid=3, support_grid=2)
    module, tokens = build(name, spec), tokens_of(spec)
    for part in module.modules():
        part.fast = fast
    expected = []
    with torch.no_grad():
        for x in tokens:
            for unit in module:
                x = pivot(x, unit, groups)
            expected.append(x)
        torch.testing.assert_close(module(tokens), torch.stack(expected))


# -- inside the network --------------------------------------------------------------------------------------


@pytest.mark.parametrize("embedding", ["vcm", "vem"])
@pytest.mark.parametrize("name", NAMES)
def test_every_aggregator_trains_with_either_embedding(name, embedding):
    network = small(aggregator=name, embedding=embedding, carry_unused=False).train()
    query, support, mask = episode(size=64)
    network(query, support, mask).square().mean().backward()
    for parameter_name, parameter in network.named_parameters():
        if not parameter_name.startswith("backbone."):
            assert parameter.grad is not None, parameter_name
            assert parameter.ndim < 2 or parameter.grad.abs().sum() > 0, parameter_name


def test_backends_agree_and_survive_a_file(tmp_path):
    query, support, mask = episode(batch=2, size=64)
    for name in ("transformer", "centerpivot"):
        network = small(aggregator=name).eval()
        vat.save(network, tmp_path / "a.safetensors")
        loaded = vat.load(tmp_path / "a.safetensors")
        with torch.inference_mode():
            fast = network(query, support, mask)
            reference = loaded.set_backend("reference")(query, support, mask)
        torch.testing.assert_close(fast, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", COMPONENTS.rows, ids=lambda row: row.name)
def test_the_components_of_the_papers_table(row):
    network = vat.create_model("vat", **row.experiment.model.overrides).train()
    query, support, mask = episode(size=64)
    stages = network.stages(query, support, mask)
    if row.name == "V":
        assert [level.depth for level in network.config.levels] == [0, 3, 3]
        torch.testing.assert_close(stages["vtm_conv5"], stages["vcm_conv5"])  # nothing to mix with yet
    stages["output"].mean().backward()
    assert all(p.grad is not None for n, p in network.named_parameters() if not n.startswith("backbone."))


def test_heads_must_divide_the_channels():
    with pytest.raises(vat.VatError, match="3 heads do not divide the 32 channels"):
        small(aggregator="transformer", heads=3)


# -- memory --------------------------------------------------------------------------------------------------


def test_every_aggregator_has_an_estimate():
    assert BLOCK_MEMORY.keys() == AGGREGATORS.keys() - {"none"}
    assert memory_estimate(VATConfig(aggregator="none")) == 0


def test_the_published_grids_need_what_the_paper_says():
    """Standard transformer about 84 GB where stored, MLP-Mixer much more, all others a few GB."""
    stored = memory_estimate(VATConfig(aggregator="transformer"), backend="reference")
    assert 84e9 < stored < 200e9
    assert memory_estimate(VATConfig(aggregator="mixer")) > 2 * stored
    for name in ("transformer", "linear", "fastformer", "swin4d", "centerpivot"):
        config = VATConfig(aggregator=name)
        inference, training = memory_estimate(config), memory_estimate(config, training=True)
        assert 5e7 < inference < training < 5e9
        assert memory_estimate(config, batch=8) > 6 * inference


@pytest.mark.parametrize("backend", ["fast", "reference"])
@pytest.mark.parametrize("name", BLOCK_MEMORY)
def test_estimates_are_near_what_training_keeps(name, backend):
    level = LevelConfig(5, 8, (32, 32), ((2, 1), (1, 2)), (1, 2), depth=2)
    config = VATConfig(levels=(level,), aggregator=name, heads=4, window=2)
    module = build_aggregator(name, AggregatorSpec.of(level, config))
    for part in module.modules():
        part.fast = backend == "fast"
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.randn(3, 4, 4, 4, 4, 32, requires_grad=True))
    estimated = 3 * 4 * 2 * BLOCK_MEMORY[name](AggregatorSpec.of(level, config), backend == "fast").kept
    assert 0.5 < sum(kept.values()) / estimated < 2
    assert output.shape == (3, 4, 4, 4, 4, 32)


def test_what_cannot_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setenv("VAT_MEMORY_GB", "20")
    sentence = r"'mixer' at 32x32x8x8 needs about 29\d\.\d GB for one episode; 20\.0 GB are available"
    with pytest.raises(vat.VatError, match=sentence):
        vat.create_model("vat", backbone="resnet18", aggregator="mixer")
    with pytest.raises(vat.VatError, match=r"'swin4d' at 32x32x8x8 needs about \d+\.\d GB"):
        vat.create_model("vat", backbone="resnet18", window=16)  # a table of 65,536 x 65,536 pairs
    monkeypatch.setenv("VAT_MEMORY_GB", "0.001")
    with pytest.raises(vat.VatError, match=r"'swin4d' .* 0\.0 GB are available"):
        vat.create_model("vat", backbone="resnet18")
    monkeypatch.setenv("VAT_MEMORY_GB", "plenty")
    with pytest.raises(vat.VatError, match="must be a number of gigabytes"):
        vat.create_model("vat", backbone="resnet18")


def test_what_cannot_fit_is_refused_before_it_runs(monkeypatch):
    network = vat.create_model("vat", backbone="resnet18", aggregator="transformer").eval()
    network.set_backend("reference")
    monkeypatch.setenv("VAT_MEMORY_GB", "20")
    query, support, mask = episode(size=32)
    sentence = r"at 32x32x8x8 needs about 137\.\d GB for one episode; 20\.0 GB.*'fast', which needs 0\.2 GB"
    with pytest.raises(vat.VatError, match=sentence), torch.inference_mode():
        network(query, support, mask)


def test_larger_batches_are_checked_too(monkeypatch):
    network = small(aggregator="transformer").set_backend("reference").eval()
    monkeypatch.setenv("VAT_MEMORY_GB", "0.01")
    query, support, mask = episode(batch=8, size=32)
    with torch.inference_mode():
        network(query[:1], support[:1], mask[:1])
        with pytest.raises(vat.VatError, match="for 8 episodes"):
            network(query, support, mask)
