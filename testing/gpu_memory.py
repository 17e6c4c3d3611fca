"""Train on fake GPUs of another size: run_ranks("testing.gpu_memory", BYTES, FLAGS)."""

import json
import sys

if __name__ == "__main__":
    import train
    from brigade.train.distributed.ranks import run_to_the_end
    from testing.fake_gpu import driver

    driver.PROPERTIES.total_memory = int(sys.argv[1])
    run_to_the_end(lambda: train.main(json.loads(sys.argv[2])))
