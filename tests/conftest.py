"""All tests run on the CPU, on hosts with GPUs too: what they compare is exact there. One thread each: tests run side by side."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["BRIGADE_CALIBRATION"] = ""  # nor with what somebody measured here
os.environ["OMP_NUM_THREADS"] = "1"
