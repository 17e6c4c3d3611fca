"""Every kind of model with images as the parameters of a test, each in its tier."""

from .marks import cases
from .vision_configs import MODELS, QUICK

KINDS = cases(*QUICK, slow=[kind for kind in MODELS if kind not in QUICK])
