"""Training: an experiment (YAML) -> episodes -> steps -> checkpoints, logs and a report.

`load_experiment` reads a configuration, `train` runs it; `vat train` is the two together.
"""

from vat.training.config import (
    DataSettings,
    Experiment,
    ModelSettings,
    TrainingSettings,
    ValidationSettings,
    load_experiment,
)
from vat.training.trainer import build_network, train

__all__ = [
    "DataSettings",
    "Experiment",
    "ModelSettings",
    "TrainingSettings",
    "ValidationSettings",
    "build_network",
    "load_experiment",
    "train",
]
