"""HSNet: the authors' numbers from the authors' files, and everything that callers expect of a model."""

import os

import pytest
import torch

import vat
from published import golden, inputs, write
from small import episode
from small import small as small_vat
from vat.aggregation.center_pivot import CenterPivotUnit
from vat.baselines import HSNet
from vat.kernels.triton_utils import interpreted

TOLERANCE = 1e-4  # of the probe's standard deviation
VGG16 = dict(  # place of each convolution among the features -> its channels
    zip(
        (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
        (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512),
        strict=True,
    )
)


def small(seed=0, **overrides) -> HSNet:
    torch.manual_seed(seed)
    return vat.create_model("hsnet", **({"backbone": "resnet18", "channels": (8, 8, 16)} | overrides))


def learnable(model):
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("backbone."))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    description, outputs = golden("hsnet_resnet50")
    path = write(tmp_path_factory.mktemp("published") / "best_model.pt", description["tensors"])
    return vat.load(path), description, {name: torch.from_numpy(value) for name, value in outputs.items()}


@pytest.fixture(scope="module")
def model() -> HSNet:
    return small().eval()


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_the_authors_numbers(published, backend):
    model, description, outputs = published
    with torch.inference_mode():
        stages = model.set_backend(backend).stages(*inputs(description))
    for name in ("cost_conv5", "cost_conv4", "cost_conv3"):
        got = stages[name].contiguous().flatten()[outputs[f"{name}.index"]]
        error = (got - outputs[f"{name}.value"]).abs().max()
        assert error <= TOLERANCE * description["probes"][name]["std"], name
    expected = outputs["logits_low"]
    assert (stages["output"] - expected).abs().max() <= TOLERANCE * expected.std()
    mask = model.finish(stages["output"], (400, 400)).argmax(1)
    assert abs(int(mask.sum()) - description["foreground_pixels"]) <= 10


def test_the_published_file_is_the_listed_model(published):
    model, description, _ = published
    assert learnable(model) == description["learnable_parameters"] == 2_573_794
    for tag in ("fss", "pascal_fold3", "coco_fold0"):
        assert vat.zoo.config_of(f"hsnet_resnet50.{tag}") == ("hsnet", model.config)


def resnet101_shapes():
    shapes = {}
    for name, shape in golden("hsnet_resnet50")[0]["tensors"].items():
        shapes[name] = [23 if n == 6 else n for n in shape] if "encoder_layer3.0" in name else shape
        if "layer3.5." in name:
            shapes |= {name.replace("layer3.5.", f"layer3.{block}."): shape for block in range(6, 23)}
    return shapes


def vgg16_shapes():
    shapes = {k: v for k, v in golden("hsnet_resnet50")[0]["tensors"].items() if ".backbone." not in k}
    for level, layers in (("4", 1), ("3", 3), ("2", 3)):
        for conv in ("conv1", "conv2"):
            name = f"module.hpn_learner.encoder_layer{level}.0.{conv}.weight"
            shapes[name] = [shapes[name][0], layers, *shapes[name][2:]]
    width = 3
    for index, channels in VGG16.items():
        shapes[f"module.backbone.features.{index}.weight"] = [channels, width, 3, 3]
        shapes[f"module.backbone.features.{index}.bias"] = [channels]
        width = channels
    return shapes | {"module.backbone.classifier.6.bias": [1000]}


@pytest.mark.parametrize(
    ("backbone", "shapes", "count"),
    [("resnet101", resnet101_shapes, 2_587_394), ("vgg16", vgg16_shapes, 2_570_018)],
)
def test_other_backbones_are_recognised_by_shapes_alone(tmp_path, backbone, shapes, count):
    model = vat.load(write(tmp_path / "best_model.pt", shapes()))
    assert vat.zoo.config_of(f"hsnet_{backbone}.fss") == ("hsnet", model.config)
    assert learnable(model) == count


def test_an_unknown_vgg_gets_one_sentence(tmp_path):
    shapes = {k: v for k, v in vgg16_shapes().items() if "features.28" not in k}
    with pytest.raises(vat.VatError, match="12 convolutions"):
        vat.load(write(tmp_path / "best_model.pt", shapes))


def test_vgg16_grids_follow_the_image():
    model = vat.create_model("hsnet_vgg16.fss").eval()
    with torch.inference_mode():
        features = model.encode_query(torch.randn(1, 3, 112, 400)).stacked
        assert {level: tuple(t.shape[1:4]) for level, t in features.items()} == {
            5: (1, 3, 12),
            4: (3, 7, 25),
            3: (3, 14, 50),
        }
        # 264 px: VGG rounds down, so the squeezed support grids of the levels differ (1, 1 and 2 cells)
        logits = model(torch.randn(1, 3, 64, 64), torch.randn(1, 3, 264, 264), torch.ones(1, 264, 264))
    assert logits.isfinite().all()


def test_both_backends_agree_on_every_stage_and_gradient():
    query, support, mask = episode(batch=2)
    stages, gradients = {}, {}
    for backend in ("reference", "fast"):
        network = small(frozen_backbone=False).train().set_backend(backend)
        stages[backend] = network.stages(query, support[:, 0], mask[:, 0])
        stages[backend]["output"].square().mean().backward()
        gradients[backend] = {n: p.grad for n, p in network.named_parameters()}
    for name, expected in stages["reference"].items():
        assert (stages["fast"][name] - expected).abs().max() <= 1e-4 * expected.std(), name
    for name, expected in gradients["reference"].items():
        error = (gradients["fast"][name] - expected).abs().max()
        assert error <= 2e-3 * expected.abs().max() + 1e-9, name


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_reach_every_learnable_tensor_and_no_frozen_one(frozen):
    network = small(frozen_backbone=frozen).train()
    for module in network.backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)  # timm starts some at zero, which stops gradients
    query, support, mask = episode()
    network(query, support, mask).square().mean().backward()
    for name, parameter in network.named_parameters():
        stopped = frozen and name.startswith("backbone.")
        assert (parameter.grad is None) is stopped, name
        assert stopped or parameter.ndim < 2 or parameter.grad.abs().sum() > 0, name


def test_a_batch_equals_single_runs_and_k_shots_run_as_one(model):
    query, support, mask = episode(batch=2, shots=3)
    with torch.inference_mode():
        together = model(query, support, mask)
        assert together.shape == (2, 3, 2, 96, 96)
        for i in range(2):
            for k in range(3):
                alone = model(query[i : i + 1], support[i : i + 1, k], mask[i : i + 1, k])
                torch.testing.assert_close(together[i, k], alone[0], rtol=1e-4, atol=1e-5)
        encoded = model.encode_support(support, mask)
        output = model.decode(model.encode_query(query), encoded)
        torch.testing.assert_close(model.finish(output, (96, 96), encoded.shots), together)


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (33, 32), (200, 61)])
def test_any_size_and_aspect_ratio(model, size):
    with torch.inference_mode():
        logits = model(torch.randn(1, 3, *size), torch.randn(1, 3, 50, 280), torch.ones(1, 50, 280))
    assert logits.shape == (1, 2, *size)
    assert logits.isfinite().all()


def test_narrow_types_keep_the_mask(model):
    arguments = [t[:, 0] if t.shape[1] == 1 else t for t in episode()]
    expected = model(*arguments)
    for logits in (
        vat.accelerate(model, dtype=torch.bfloat16)(*arguments),
        vat.accelerate(model)(*arguments),
    ):
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max() < 0.2 * expected.std()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
@pytest.mark.parametrize(("channels", "kernel", "stride"), [(4, 5, 4), (16, 3, 2)])
def test_the_cuda_kernels_take_thinned_views(channels, kernel, stride):
    torch.manual_seed(0)
    unit = CenterPivotUnit(channels, 16, kernel, stride)
    volume = torch.randn(1, channels, 2, 3, 5, 6).permute(0, 2, 3, 4, 5, 1)
    unit.fast = False
    expected = unit(volume)
    unit.fast = True
    with interpreted():
        torch.testing.assert_close(unit(volume), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_a_gpu_gives_the_authors_numbers(published, backend):
    model, description, outputs = published
    torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        arguments = (t.cuda() for t in inputs(description))
        output = model.cuda().set_backend(backend).stages(*arguments)["output"].cpu()
    expected = outputs["logits_low"]
    assert (output - expected).abs().max() <= TOLERANCE * expected.std()


def test_round_trip_is_bit_exact(model, tmp_path):
    vat.save(model, tmp_path / "a.safetensors")
    loaded = vat.load(tmp_path / "a.safetensors")
    assert loaded.config == model.config
    arguments = [t[:, 0] if t.shape[1] == 1 else t for t in episode()]
    with torch.inference_mode():
        assert torch.equal(model(*arguments), loaded(*arguments))


def test_wrong_calls_get_one_sentence(model):
    query, support, mask = episode()
    with pytest.raises(vat.VatError, match="mask is missing"):
        model(query, support)
    with pytest.raises(vat.VatError, match="does not fit"):
        model(query, support, mask[:, :, :10])
    with pytest.raises(vat.VatError, match="one support set per query"):
        model(query.repeat(2, 1, 1, 1), support, mask)
    with pytest.raises(vat.VatError, match="no backend"):
        model.set_backend("cuda")
    with pytest.raises(vat.VatError, match="HSNet segments"):
        small(task="correspondence")


@pytest.mark.slow
def test_compile_accepts_the_model(model):
    arguments = [t[:, 0] if t.shape[1] == 1 else t for t in episode(size=64)]
    with torch.no_grad():
        expected = model.set_backend("auto")(*arguments)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_its_decoder_serves_vat_too():
    network = small_vat(decoder="hsnet").train()
    query, support, mask = episode()
    output = network.decode(network.encode_query(query), network.encode_support(support, mask))
    assert output.shape == (1, 2, 16, 16)
    logits = network(query, support[:, 0], mask[:, 0])
    assert logits.shape == (1, 2, 96, 96)
    logits.mean().backward()
    with pytest.raises(vat.VatError, match="no flow"):
        small_vat(task="correspondence", decoder="hsnet")
