"""What callers rely on, at a hundredth of the published size."""

import itertools

import pytest
import torch

import vat
from small import LEVELS, episode, small
from vat.config import StageConfig
from vat.model import merge, with_prototypes
from vat.network import flow_from_map
from vat.prototype import PrototypeNetwork
from vat.resize import resize


@pytest.fixture(scope="module")
def model() -> vat.VAT:
    return small().eval()


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_a_batch_equals_single_runs(model, backend):
    model.set_backend(backend)
    query, support, mask = episode(batch=3)
    with torch.inference_mode():
        together = model(query, support[:, 0], mask[:, 0])
        alone = torch.cat([model(query[i : i + 1], support[i : i + 1, 0], mask[i : i + 1, 0]) for i in range(3)])
    assert together.shape == (3, 2, 96, 96)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_both_backends_agree_on_every_stage(model):
    query, support, mask = episode(batch=2)
    with torch.inference_mode():
        reference = model.set_backend("reference").stages(query, support[:, 0], mask[:, 0])
        fast = model.set_backend("fast").stages(query, support[:, 0], mask[:, 0])
    for name, expected in reference.items():
        assert (fast[name] - expected).abs().max() <= 1e-4 * expected.std(), name


def test_both_backends_give_the_same_gradients():
    query, support, mask = episode()
    gradients = {}
    for backend in ("reference", "fast"):
        network = small(frozen_backbone=False, appearance_dropout=0.0).train().set_backend(backend)
        network(query, support[:, 0], mask[:, 0]).square().mean().backward()
        gradients[backend] = {n: p.grad for n, p in network.named_parameters()}
    for name, expected in gradients["reference"].items():
        got = gradients["fast"][name]
        scale = expected.abs().max()
        assert (got - expected).abs().max() <= 2e-3 * scale + 1e-9, name


@pytest.mark.parametrize("aggregator", ["swin4d", "linear"])
def test_recomputed_activations_give_the_same_gradients(aggregator):
    query, support, mask = episode(batch=3)
    gradients = []
    for recompute in (False, True):
        network = small(appearance_dropout=0.0, aggregator=aggregator).train().set_recompute(recompute)
        network(query, support[:, 0], mask[:, 0]).square().mean().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.requires_grad})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9, name


def test_k_supports_run_as_one_batch_and_in_any_order(model):
    query, support, mask = episode(batch=2, shots=3)
    with torch.inference_mode():
        logits = model(query, support, mask)
        assert logits.shape == (2, 3, 2, 96, 96)
        single = model(query, support[:, 1], mask[:, 1])
        torch.testing.assert_close(logits[:, 1], single, rtol=1e-4, atol=1e-5)
        for order in itertools.permutations(range(3)):
            shuffled = model(query, support[:, order], mask[:, order])
            for rule in ("paper", "published"):
                assert torch.equal(vat.vote(shuffled.argmax(2), rule), vat.vote(logits.argmax(2), rule))


def test_encoded_supports_serve_any_query(model):
    query, support, mask = episode(batch=1, shots=2)
    other = torch.randn(1, 3, 64, 120)
    with torch.inference_mode():
        encoded = model.encode_support(support, mask)
        for image in (query, other):
            output = model.decode(model.encode_query(image), encoded)
            expected = model(image, support, mask)
            torch.testing.assert_close(model.finish(output, image.shape[-2:], 2), expected)


def test_voting_rules():
    masks = torch.tensor([[[1, 1, 0, 0]], [[1, 0, 0, 0]], [[0, 0, 1, 0]], [[0, 0, 0, 0]]])[None]  # K = 4, votes 2 1 1 0
    assert vat.vote(masks, "paper").tolist() == [[[False, False, False, False]]]  # 2/4 does not exceed 0.5
    assert vat.vote(masks, "published").tolist() == [[[True, True, True, False]]]  # 2/2, 1/2, 1/2, 0
    assert not vat.vote(torch.zeros(1, 5, 4, 4), "published").any()
    with pytest.raises(vat.VatError, match="majority"):
        vat.vote(masks, "majority")


def test_merged_predictions_are_weighed_or_counted():
    """One of three examples is sure of the first pixel, the other two slightly against it."""
    odds = torch.tensor([[[[4.0, -4.0]], [[-0.5, 0.1]], [[-0.5, 0.1]]]])
    logits = torch.stack([torch.zeros_like(odds), odds], 2)
    assert merge(logits, "mean").tolist() == [[[True, False]]]
    assert merge(logits, "paper").tolist() == [[[False, True]]]
    assert merge(logits, "paper").equal(vat.vote(logits.argmax(2)))


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_prototypes_beside_the_prediction_are_those_of_the_prototype_model(backend):
    """On images whose coarsest maps are as large as the grid, so that neither model resizes them."""
    model = small().eval().set_backend(backend)
    side = 32 * LEVELS[0].grid
    query, support, mask = episode(batch=2, size=side)
    alone = PrototypeNetwork(vat.create_model("prototype", backbone=model.config.backbone).config).eval()
    alone.backbone = model.backbone

    def output(network, masks):
        return network.decode(network.encode_query(query), network.encode_support(support[:, 0], masks[:, 0]))

    with torch.inference_mode():
        plain, cosines = output(model, mask), output(alone, mask)
        both = output(with_prototypes(model, 0.5), mask)
        in_training = output(model.train(), mask)
    expected = plain + 0.5 * resize(cosines, (plain.shape[-2], plain.shape[-1]))
    torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-4)
    assert (in_training - both).abs().max() > 0.1
    with pytest.raises(vat.VatError, match="prototype"):
        with_prototypes(alone, 0.5)


def test_a_zero_mask_gives_a_defined_result(model):
    query, support, mask = episode()
    with torch.inference_mode():
        logits = model(query, support[:, 0], torch.zeros_like(mask[:, 0]))
        again = model(query, torch.randn_like(support[:, 0]), torch.zeros_like(mask[:, 0]))
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, again)  # nothing of the support is visible


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (33, 32), (1500, 200), (61, 97)])
def test_any_size_and_aspect_ratio(model, size):
    query = torch.randn(1, 3, *size)
    support = torch.randn(1, 3, 50, 80)
    with torch.inference_mode():
        logits = model(query, support, torch.ones(1, 50, 80))
    assert logits.shape == (1, 2, *size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("task", ["segmentation", "correspondence"])
def test_gradients_reach_every_learnable_tensor_and_no_frozen_one(task):
    network = small(task=task).train()
    for module in network.backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)  # timm starts some at zero, which stops gradients
    query, support, mask = episode()
    arguments = (query, support[:, 0]) if task == "correspondence" else (query, support[:, 0], mask[:, 0])
    network(*arguments).square().mean().backward()
    for name, parameter in network.named_parameters():
        frozen = name.startswith("backbone.") and task == "segmentation"
        assert parameter.requires_grad is not frozen, name
        assert (parameter.grad is None) is frozen, name
        if not frozen and not name.startswith("unused."):
            # A ReLU'd 1x1 projection or an unlucky bias may be zero for one input, but not a whole weight matrix.
            assert parameter.ndim < 2 or parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_never_leaves_eval_mode(frozen):
    network = small(frozen_backbone=frozen).train()
    before = network.backbone.body.bn1.running_mean.clone()
    network(*(t[:, 0] if t.ndim != 4 or t.shape[1] == 1 else t for t in episode()))
    assert torch.equal(network.backbone.body.bn1.running_mean, before)


def test_appearance_dropout_acts_in_training_only():
    network = small()
    query, support, mask = episode()
    run = lambda: network(query, support[:, 0], mask[:, 0])  # noqa: E731
    with torch.no_grad():
        network.train()
        assert not torch.equal(run(), run())
        network.eval()
        assert torch.equal(run(), run())


def test_flow_of_the_identity_map_is_zero():
    steps = torch.linspace(-1, 1, 8)
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    assert flow_from_map(torch.stack([x, y])[None]).abs().max() < 1e-6


def test_wrong_calls_get_one_sentence(model):
    query, support, mask = episode()
    with pytest.raises(vat.VatError, match="mask is missing"):
        model(query, support)
    with pytest.raises(vat.VatError, match="does not fit"):
        model(query, support, mask[:, :, :10])
    with pytest.raises(vat.VatError, match="one support set per query"):
        model(query.repeat(2, 1, 1, 1), support, mask)
    with pytest.raises(vat.VatError, match="no mask"):
        small(task="correspondence")(query, support[:, 0], mask[:, 0])
    with pytest.raises(vat.VatError, match="no backend"):
        model.set_backend("cuda")


def traceable(task):
    """A network of two levels, so that one guides the next: tracing takes as long as there are operations."""
    network = small(task=task, backbone="test_resnet", levels=LEVELS[:2], stages=(StageConfig(8, 4, 8, None),)).eval()
    query, support, mask = episode()
    return network, (query, support[:, 0]) if task == "correspondence" else (query, support[:, 0], mask[:, 0])


@pytest.mark.parametrize("task", ["segmentation", "correspondence"])
def test_export_accepts_the_model(task):
    network, arguments = traceable(task)
    with torch.no_grad():
        exported = torch.export.export(network, arguments, strict=False)
        torch.testing.assert_close(exported.module()(*arguments), network(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "correspondence"])
def test_compile_accepts_the_model(task):
    network, arguments = traceable(task)
    with torch.no_grad():
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*arguments), network(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"embedding": "vem"},
        {"aggregator": "none"},
        {"gpp": False},
        {"residual": False},
        {"decoder": "ad"},
        {"window": 3, "decoder_window": 5},
        {"carry_unused": False},
    ],
    ids=str,
)
def test_variants_run_and_learn(overrides):
    network = small(**overrides).train()
    query, support, mask = episode()
    logits = network(query, support[:, 0], mask[:, 0])
    assert logits.shape == (1, 2, 96, 96)
    logits.mean().backward()
