"""On a CUDA device: the kernels and the whole network against the golden numbers. Run with `pytest -m gpu`."""

import threading

import pytest
import torch

import vat
from published import golden, inputs, write
from small import episode, small
from vat.bench import Case, run_case
from vat.runner import GraphedTraining, _AutocastPass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=["vat_resnet50_fss", "vat_resnet101_correspondence"])
def case(request, tmp_path_factory):
    description, outputs = golden(request.param)
    path = write(tmp_path_factory.mktemp("published") / "best_model.pt", description["tensors"])
    return vat.load(path, device="cuda"), description, outputs


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_float32_agrees_with_the_golden_stages(case, backend):
    model, description, outputs = case
    torch.backends.cudnn.allow_tf32 = False
    arguments = [t.cuda() for t in inputs(description)]
    with torch.inference_mode():
        stages = model.set_backend(backend).stages(*arguments)
    for name in (n for n in stages if n != "output"):
        got = stages[name].contiguous().flatten().cpu()[torch.from_numpy(outputs[f"{name}.index"])]
        error = (got - torch.from_numpy(outputs[f"{name}.value"])).abs().max().item()
        assert error <= 1e-4 * description["probes"][name]["std"], (name, error)


@pytest.mark.parametrize("graphs", [False, True])
def test_bfloat16_gives_the_same_mask(case, graphs):
    model, description, outputs = case
    if "mask" not in description:
        pytest.skip("a correspondence model has no mask")
    runner = vat.accelerate(model, dtype=torch.bfloat16, graphs=graphs)
    arguments = [t.cuda() for t in inputs(description)]
    low = torch.from_numpy(outputs["logits_low"])
    theirs = torch.nn.functional.interpolate(low, (473, 473), mode="bilinear", align_corners=True).argmax(1)
    for _ in range(3):
        logits = runner(*arguments)
    assert (logits.argmax(1).cpu() == theirs).float().mean() >= 0.999


@pytest.mark.parametrize(
    "name", ["hsnet_resnet50.fss", "cats_resnet101.pfpascal", "ncnet_resnet101.pfpascal", "chm_resnet101.pfpascal"]
)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_other_methods_run_and_learn(name, mode):
    result = run_case(Case(name, "cuda", mode, "bfloat16", batch=2, size=128, repeats=1, count=False))
    assert result.error is None
    assert result.peak_bytes > 0


def test_prototypes_can_be_recorded_too():
    model = small(prototype_weight=0.4).cuda().eval()
    arguments = [t.cuda() for t in episode(batch=2, shots=2)]
    plain, recorded = (vat.accelerate(model, dtype=torch.bfloat16, graphs=graphs) for graphs in (False, True))
    expected = plain(*arguments)
    for _ in range(3):
        assert (recorded(*arguments) - expected).abs().max() <= 1e-3
    without = vat.accelerate(small().cuda().eval(), dtype=torch.bfloat16)(*arguments)
    assert (expected - without).abs().max() > 0.1


def test_training_replayed_as_a_graph_gives_the_gradients_of_a_plain_step():
    query, support, mask = (t.cuda() for t in episode(batch=2))
    gradients = []
    for graphs in (False, True):
        network = small(appearance_dropout=0.0).cuda().train()
        forward = GraphedTraining(network, torch.bfloat16) if graphs else _AutocastPass(network, torch.bfloat16)
        forward(query, support[:, 0], mask[:, 0]).square().mean().backward()
        gradients.append({n: p.grad for n, p in network.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= 2e-2 * expected.abs().max() + 1e-9, name


def test_a_graph_is_recorded_while_another_thread_pins_memory():
    """As a loader's thread does; a recording that minds it ends the run."""
    query, support, mask = (t.cuda() for t in episode(batch=2))
    forward = GraphedTraining(small().cuda().train(), torch.bfloat16)
    stop = threading.Event()

    def pin():
        size = 1 << 20
        while not stop.is_set():
            size += 4096  # a new size each time, so that memory has to be asked for
            torch.empty(size, dtype=torch.uint8).pin_memory()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        output = forward(query, support[:, 0], mask[:, 0])
    finally:
        stop.set()
        thread.join()
    assert output.isfinite().all()


def test_gradients_agree_with_the_reference():
    query, support, mask = (t.cuda() for t in episode(batch=2))
    gradients = {}
    for backend in ("reference", "fast"):
        network = small(frozen_backbone=False, appearance_dropout=0.0).cuda().train().set_backend(backend)
        network(query, support[:, 0], mask[:, 0]).square().mean().backward()
        gradients[backend] = {n: p.grad for n, p in network.named_parameters()}
    for name, expected in gradients["reference"].items():
        difference = (gradients["fast"][name] - expected).abs().max()
        assert difference <= 2e-3 * expected.abs().max() + 1e-9, name
