"""DiLoCo (Douillard et al., 2023): Local SGD with a Nesterov step on the mean displacement.

D = mean_k (x - x_k),  v <- m v + D,  x <- x - lr (D + m v),  x_k <- x
"""

from palsgd.method import Method
from palsgd.outer import nesterov
from palsgd.registry import Row

ROW = Row(
    name="diloco",
    title="DiLoCo",
    method=Method,
    summary="an outer Nesterov step on the mean of H local steps",
    colours=("#0072b2", "#5cb8f2"),
    dashes=(5, 1.8),
    outer=nesterov,
    default=True,
)
