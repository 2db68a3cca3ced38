"""Adam's constants (Kingma and Ba 2015), for every form of the update."""

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-5
