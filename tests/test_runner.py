"""The fast runner gives what the model gives, and leaves the model alone."""

import copy

import pytest
import torch

import vat
from small import episode, small
from vat.features import Backbone
from vat.features.folding import fold_batch_norm
from vat.runner import GraphCache, GraphedTraining


def randomise_norms(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.running_mean.copy_(0.2 * torch.randn(norm.num_features, generator=generator))
            norm.running_var.copy_(0.5 + torch.rand(norm.num_features, generator=generator))
            norm.weight.data.copy_(1 + 0.1 * torch.randn(norm.num_features, generator=generator))
            norm.bias.data.copy_(0.1 * torch.randn(norm.num_features, generator=generator))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg11_bn", "tf_efficientnet_lite0", "convnext_atto"])
def test_folding_batch_norm_changes_nothing(name):
    backbone = Backbone(name)
    randomise_norms(backbone)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        got = backbone(images)
        backbone.fast = False
        expected = backbone(images)
    folded = fold_batch_norm(backbone.body)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in folded.modules())
    for level, maps in expected.items():
        for a, b in zip(maps, got[level], strict=True):
            assert (a - b).abs().max() <= 1e-4 * a.std(), level


def test_a_folded_backbone_follows_changed_weights():
    backbone, donor = Backbone("resnet18"), Backbone("resnet18")
    images = torch.randn(1, 3, 64, 64)
    before = backbone(images)[5][-1]
    backbone.load_state_dict(donor.state_dict())
    after = backbone(images)[5][-1]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, donor(images)[5][-1])
    with torch.no_grad():
        backbone.body.conv1.weight.mul_(2)
    assert not torch.allclose(backbone(images)[5][-1], after)
    assert backbone.double()(images.double())[5][-1].dtype == torch.float64


@pytest.mark.parametrize("task", ["segmentation", "correspondence"])
def test_the_runner_equals_the_model(task):
    model = small(task=task).eval()
    randomise_norms(model)
    before = copy.deepcopy(model.state_dict())
    query, support, mask = episode(batch=2, shots=1)
    arguments = (query, support[:, 0]) if task == "correspondence" else (query, support[:, 0], mask[:, 0])
    runner = vat.accelerate(model)
    with torch.no_grad():
        expected = model(*arguments)
    torch.testing.assert_close(runner(*arguments), expected, rtol=1e-3, atol=1e-4)
    encoded = runner.encode_support(*arguments[1:])
    torch.testing.assert_close(runner.query(query, encoded), expected, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_bfloat16_stays_close():
    model = small().eval()
    query, support, mask = episode(batch=1)
    with torch.no_grad():
        expected = model(query, support[:, 0], mask[:, 0])
    got = vat.accelerate(model, dtype=torch.bfloat16)(query, support[:, 0], mask[:, 0])
    assert got.dtype == torch.float32
    assert (got - expected).norm() / expected.norm() < 0.05
    assert next(model.parameters()).dtype == torch.float32


def test_graphs_are_recorded_at_the_second_sight_and_bounded(monkeypatch):
    """Without a GPU: the book-keeping alone, with a recorder that counts."""
    recorded = []

    class FakeGraph:
        def __init__(self, function, slots, output):
            self.function, self.slots, self.output = function, slots, output

        def replay(self):
            self.output.copy_(self.function(*self.slots))

    def record(function, inputs):
        slots = [t.clone() for t in inputs]
        output = function(*slots)
        recorded.append(inputs[0].shape)
        return FakeGraph(function, slots, output), slots, output

    monkeypatch.setattr(GraphCache, "_record", staticmethod(record))
    cache = GraphCache(limit=2)
    for size in (3, 4, 3, 3, 4):
        x = torch.rand(size)
        assert torch.equal(cache("double", lambda t: 2 * t, (x,)), 2 * x)
    assert [tuple(s) for s in recorded] == [(3,), (4,)]
    for size in range(5, 30):  # ever new sizes: nothing is recorded, and little is remembered
        cache("double", lambda t: 2 * t, (torch.rand(size),))
    assert len(recorded) == 2
    assert len(cache._seen) == 2


def test_recordings_of_training_do_not_mind_other_threads(monkeypatch):
    """A loader's thread that pins memory would spoil them; `vat.runner.BESIDE_THREADS`."""
    before, modes = torch.cuda.graph, []

    def record(module, examples, **options):
        modes.append(torch.cuda.graph.keywords["capture_error_mode"])
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    query, support, mask = episode()
    GraphedTraining(small(), torch.float32)(query, support[:, 0], mask[:, 0])
    assert modes == ["thread_local"]
    assert torch.cuda.graph is before
