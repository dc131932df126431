"""Local SGD (Stich, 2018): every H steps the local models are averaged.

    x <- mean_k x_k,  x_k <- x

It is DiLoCo whose outer step is plain SGD with learning rate 1.
"""

from palsgd.method import Method
from palsgd.outer import plain_average
from palsgd.registry import Row

ROW = Row(
    name="localsgd",
    title="LocalSGD",
    method=Method,
    summary="local models are averaged every H steps",
    colours=("#009e73", "#40c99b"),
    dashes=(1, 1.6),
    outer=plain_average,
    fixed_outer=True,
    default=True,
)
