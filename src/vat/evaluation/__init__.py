"""From a model and a data set to a report: predictions -> records per episode -> results -> tables.

report = evaluate(model, build("pascal", root, split="test", fold=3, shots=5), shots=(1, 5))
report.results["5"]["miou"]
"""

from vat.evaluation.report import Report
from vat.evaluation.run import evaluate

__all__ = ["Report", "evaluate"]
