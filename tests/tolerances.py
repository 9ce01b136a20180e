"""How far numbers may differ, and why. The one place for such figures."""

# Greedy tokens are compared up to the first position where the reference is nearly undecided: where the gap between its
# two most likely tokens (natural logarithm) is below this.
#
# float32, one device against another: sums are taken in another order; the logits then differ by some 1e-5.
FLOAT32_GAP = 1e-3
# bfloat16 has 8 bits of mantissa: a logit of size 16 is rounded by up to 2**-4, and the roundings of all layers add up.
BFLOAT16_GAP = 0.5
