"""Worker of test_gpu_lane.py: train.py on ranks that see one GPU each, as number 0 (`srun --gpus-per-task=1`)."""

import os
import sys

import train
from brigade.train.distributed.ranks import run_to_the_end

from .fake_gpu.native import native

if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    native.set_device_count(1)
    run_to_the_end(lambda: train.main(sys.argv[1:]))
