"""A program for `bisect switches`: zero only with s1 and s3 on. With SLOW set it takes a while and says who it is."""

import json
import os
import sys
import time
from pathlib import Path

on = {name for name, state in json.loads(os.environ["ZKL_SWITCHES"]).items() if state}
if os.environ.get("SLOW"):
    Path(os.environ["SLOW"], f"{os.getpid()}").write_text(str(os.getppid()))
    time.sleep(0.5)
print(json.dumps({"missing": sorted({"s1", "s3"} - on)}))
sys.exit(0 if {"s1", "s3"} <= on else 1)
