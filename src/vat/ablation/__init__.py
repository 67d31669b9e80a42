"""Ablations: a plan (YAML) -> a training run for every row and seed -> one table beside the paper's numbers.

plan = load_plan("configs/ablations/components.yaml", base="synthetic")
run_plan(plan, "runs/components", make_fabric(devices=1))
"""

from vat.ablation.parallel import run_plan_apart
from vat.ablation.plan import Plan, Row, load_plan
from vat.ablation.report import write_tables
from vat.ablation.run import run_plan

__all__ = ["Plan", "Row", "load_plan", "run_plan", "run_plan_apart", "write_tables"]
