"""Train one configuration: python train.py configs/demo.yaml --model.position learned

In several processes: torchrun --nproc-per-node 2 train.py configs/demo.yaml (docs/distributed.md).
"""

import sys

from training.command_line import exit_on_user_error, parse_training
from training.run_folder import RunFolder


@exit_on_user_error()
def main() -> None:
    """Read the command line, then train; torch is imported once the arguments are known to be right."""
    request = parse_training()
    from training.distributed import joined
    from training.loop import Interrupted, train

    name = request.config_path.stem if request.config_path else "base"
    folder = RunFolder(request.config.training.out or f"runs/{name}")
    with joined(request.config.training) as processes:
        try:
            train(request.config, folder, request.resume, request.overwrite, processes)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
