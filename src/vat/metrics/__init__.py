"""Metrics of both tasks, as `torchmetrics.Metric`s whose states are plain sums.
 Every state is summed over processes, so a result does not depend on the number of processes, the batch size
or the order of the episodes. One convention throughout: functions return fractions per image or pair, metrics
return percent over everything seen, as the papers print them.
"""

from vat.metrics.boundary import MeanBoundaryAccuracy, boundary_accuracy, boundary_radii, boundary_region
from vat.metrics.iou import FewShotIoU, intersection_and_union
from vat.metrics.pck import DIFFICULTY_LEVELS, PCK, pck_per_pair
from vat.metrics.transfer import MaskTransfer, mask_agreement

__all__ = [
    "DIFFICULTY_LEVELS",
    "PCK",
    "FewShotIoU",
    "MaskTransfer",
    "MeanBoundaryAccuracy",
    "boundary_accuracy",
    "boundary_radii",
    "boundary_region",
    "intersection_and_union",
    "mask_agreement",
    "pck_per_pair",
]
