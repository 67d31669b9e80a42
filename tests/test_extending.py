"""The page on extending: its code runs, its rows train, and their weights load again."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vat
from vat.aggregation.vtm import AGGREGATORS
from vat.cli import app
from vat.decoder import DECODERS
from vat.plugins import VARIABLE, use_plugins
from vat.registry import FAMILIES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
SYNTHETIC = ROOT / "configs" / "ablations" / "base" / "synthetic.yaml"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def _registries_as_they_were(monkeypatch):
    """What a plug-in registers is gone for the other tests."""
    registries = [(registry, dict(registry)) for registry in (AGGREGATORS, DECODERS, FAMILIES)]
    monkeypatch.setenv(VARIABLE, "")
    yield
    for registry, before in registries:
        registry.clear()
        registry.update(before)
    sys.modules.pop("own", None)


def test_every_part_is_about_thirty_lines():
    for block in blocks("python"):
        code = [line for line in block.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 35


def test_the_code_of_the_page_trains_as_rows_beside_vat(tmp_path):
    (tmp_path / "own.py").write_text("\n\n".join(blocks("python")))
    (plan,) = blocks("yaml")
    (tmp_path / "own.yaml").write_text(plan)
    arguments = ["--plugin", tmp_path / "own.py", "ablate", tmp_path / "own.yaml", "--base", SYNTHETIC]
    arguments += ["--steps", 1, "--episodes", 2, "--no-bench", "--out", tmp_path / "out", "--accelerator", "cpu"]
    for change in ("training.batch_size=2", "training.workers=0", "validation.episodes=2", "evaluation.shots=[1]"):
        arguments += ["--set", change]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    for name in re.findall(r"- name: (\w+)", plan):
        network = vat.load(tmp_path / "out" / name / "seed0" / "last.safetensors")
        assert network.config.task == "segmentation"
    table = (tmp_path / "out" / "table.md").read_text()
    assert "our method" in table
    assert "not run yet" not in table


def test_a_plugin_that_fails_or_is_missing_gets_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(vat.VatError, match=r"broken\.py fails: ModuleNotFoundError"):
        use_plugins([tmp_path / "broken.py"])


def test_a_missing_plugin_is_named(tmp_path):
    with pytest.raises(vat.VatError, match="There is no plug-in"):
        use_plugins([tmp_path / "absent.py"])


def test_a_plugin_may_not_hide_a_module(tmp_path):
    (tmp_path / "json.py").write_text("")
    with pytest.raises(vat.VatError, match="name of a Python module"):
        use_plugins([tmp_path / "json.py"])
