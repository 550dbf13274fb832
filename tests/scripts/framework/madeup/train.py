"""What each of its ranks runs."""

import os
import runpy
import sys
from pathlib import Path

import yaml

config = yaml.safe_load(Path(sys.argv[1]).read_text())
assert os.environ["MINE"] == "1", "the environment of the command that starts the ranks"
output = Path(config["output_dir"])
output.mkdir(parents=True, exist_ok=True)
(output / f"log{os.environ['RANK']}").write_text("begun")
sys.argv = [sys.argv[0], "--config", config["deepspeed"], "--steps", str(config["steps"])]
runpy.run_path(str(Path(__file__).parents[2] / "launched.py"), run_name="__main__")
