"""All tests run on the CPU, on hosts with GPUs too: what they compare is exact there."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["BRIGADE_CALIBRATION"] = ""  # nor with what somebody measured here
