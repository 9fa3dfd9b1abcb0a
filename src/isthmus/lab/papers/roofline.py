"""What systems are taken to reach of their hardware, where a paper does not say: the same for all of them."""

from isthmus.core.cost import Coefficients

ROOFLINE = Coefficients(
    matmul=0.6,
    weight_read=0.8,
    kv_read=0.8,
    link=1.0,
    layer_s=0.0,
    sequence_s=0.0,
    allreduce_s=0.0,
    step_s=0.0,
    origin="60 % of the peak, 80 % of the bandwidth, no overhead; chosen once, for all systems",
)
