"""NC-Net- and CHM-style aggregation: 4D convolution by its definition, kernels that share, models that learn."""

import itertools

import pytest
import torch

import vat
from small import episode
from vat.baselines.consensus import FullKernel, PositionSensitiveKernel, conv4d, position_sensitive_index


def small(family, **overrides):
    settings = {"backbone": "resnet18", "hyperpixels": (2, 5), "grid": 5}
    settings |= {"kernels": (3, 3), "channels": (4, 1)} if family == "ncnet" else {}
    torch.manual_seed(0)
    return vat.create_model(family, **(settings | overrides))


def pair(batch=2, size=64):
    target, source, _ = episode(batch=batch, size=size)
    return target, source[:, 0]


def convolve(volume, weight, bias):
    """y(p) = bias + sum over offsets d of W(d) x(p + d), position by position; zero outside of the volume."""
    k = weight.shape[-1]
    result = torch.zeros(volume.shape[0], weight.shape[0], *volume.shape[2:], dtype=volume.dtype)
    for p in itertools.product(*map(range, volume.shape[2:])):
        for tap in itertools.product(range(k), repeat=4):
            at = [x + t - k // 2 for x, t in zip(p, tap, strict=True)]
            if all(0 <= x < n for x, n in zip(at, volume.shape[2:], strict=True)):
                result[(slice(None), slice(None), *p)] += (
                    volume[(slice(None), slice(None), *at)] @ weight[(slice(None), slice(None), *tap)].T
                )
    return result + bias.view(-1, 1, 1, 1, 1)


def test_the_4d_convolution_follows_its_definition():
    volume = torch.randn(2, 2, 3, 4, 2, 3, dtype=torch.float64)
    weight, bias = torch.randn(3, 2, 3, 3, 3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(conv4d(volume, weight, bias), convolve(volume, weight, bias))


def test_larger_kernels_reach_further_than_the_volume():
    volume = torch.randn(1, 1, 2, 3, 2, 2, dtype=torch.float64)
    weight, bias = torch.randn(1, 1, 5, 5, 5, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    torch.testing.assert_close(conv4d(volume, weight, bias), convolve(volume, weight, bias))


def test_position_sensitive_kernels_share_by_distance_and_by_nothing_else():
    index = position_sensitive_index(5)
    assert int(index.max()) + 1 == 55
    keys = {}
    for tap in itertools.product(range(5), repeat=4):
        uy, ux, vy, vx = (t - 2 for t in tap)
        lengths = frozenset({(uy**2 + ux**2), (vy**2 + vx**2)})
        keys.setdefault(((uy - vy) ** 2 + (ux - vx) ** 2, lengths), set()).add(int(index[tap]))
    assert all(len(numbers) == 1 for numbers in keys.values())
    assert len(keys) == 55


def test_position_sensitive_kernels_treat_both_images_alike():
    kernel = PositionSensitiveKernel(1, 1, 3)
    torch.nn.init.normal_(kernel.weight)
    volume, bias = torch.randn(1, 1, 3, 4, 5, 2), torch.zeros(1)
    swapped = conv4d(volume.permute(0, 1, 4, 5, 2, 3), kernel(), bias).permute(0, 1, 4, 5, 2, 3)
    torch.testing.assert_close(conv4d(volume, kernel(), bias), swapped)


@pytest.mark.parametrize("kernel", [FullKernel, PositionSensitiveKernel])
def test_kernels_start_as_averages(kernel):
    weight = kernel(4, 2, 5)()
    assert bool((weight >= 0).all())
    torch.testing.assert_close(weight.flatten(1).sum(1), torch.ones(2), atol=0.2, rtol=0)


@pytest.mark.parametrize("family", ["ncnet", "chm"])
def test_the_aggregation_step_by_step(family):
    """Filter, convolve (for NC-Net both ways), filter, add: each by its definition."""
    network = small(family, grid=3).double().eval()
    with torch.no_grad():
        for parameter in network.biases:
            parameter += 0.01
    stages = network.stages(*(image.double() for image in pair()))
    cost = stages["cost"]

    def layers(volume):
        for kernel, bias in zip(network.kernels, network.biases, strict=True):
            volume = convolve(volume, kernel(), bias).relu()
        return volume

    positive = cost.clamp_min(0)
    expected = layers(positive)
    if family == "ncnet":
        expected = expected + layers(positive.permute(0, 1, 4, 5, 2, 3)).permute(0, 1, 4, 5, 2, 3)
    torch.testing.assert_close(stages["aggregated"], expected)
    matches = expected[:, 0].reshape(-1, 9, 9)
    filtered = matches**3 / matches.amax(1, keepdim=True) / matches.amax(2, keepdim=True)
    weights = ((filtered + cost.mean(1).reshape(-1, 9, 9)) / 0.02).softmax(-1)
    x = torch.linspace(-1, 1, 3, dtype=torch.float64).repeat(3)
    torch.testing.assert_close(stages["output"][:, 0].flatten(1), weights @ x)


@pytest.mark.parametrize("family", ["ncnet", "chm"])
def test_a_step_moves_every_weight_towards_the_truth(family):
    network = small(family, frozen_backbone=True)
    target, source = pair()
    truth = torch.zeros(2, 2, 5, 5)
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(5):
        loss = (network(target, source) - truth).norm(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.abs().sum() > 0 for p in [*network.kernels.parameters(), *network.biases])
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["ncnet", "chm"])
def test_a_file_gives_the_same_flow(family, tmp_path):
    network = small(family).eval()
    vat.save(network, tmp_path / "m.safetensors")
    loaded = vat.load(tmp_path / "m.safetensors")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(*pair()), network(*pair()))


@pytest.mark.parametrize("family", ["ncnet", "chm"])
def test_bfloat16_inference_gives_nearly_the_same_flow(family):
    network = small(family).eval()
    target, source = pair()
    with torch.inference_mode():
        expected = network(target, source)
    flow = vat.accelerate(network, dtype=torch.bfloat16)(target, source)
    assert flow.dtype == torch.float32
    assert (flow - expected).abs().mean() < 0.5


def test_weights_of_the_published_sizes():
    def counted(name):
        network = vat.create_model(name, backbone="resnet18", hyperpixels=(6,))
        return sum(p.numel() for p in [*network.kernels.parameters(), *network.biases])

    assert counted("ncnet_resnet101.spair") == 5**4 * (16 + 16 * 16 + 16) + 33
    assert counted("chm_resnet101.pfpascal") == 2 * 55 + 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"channels": (4, 2)}, "the last layer must have one channel"),
        ({"kernels": (3, 3, 3)}, "equally many"),
        ({"kernels": (3, 4)}, "must be odd"),
        ({"task": "segmentation"}, "NCNet finds correspondences"),
        ({"hyperpixels": (99,)}, "must name maps"),
    ],
)
def test_wrong_settings_get_one_sentence(overrides, sentence):
    with pytest.raises(vat.VatError, match=sentence):
        small("ncnet", **overrides)
