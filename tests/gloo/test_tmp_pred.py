from __future__ import annotations
import json
from tests.gloo.conftest import BPIPE, Case, TINY
from tests.gloo.test_slices import *
from bpipe.plan.options import setup_from
from bpipe.plan.budget import predicted_devices
CASES = {
 "gpt_whole": (*BATCH, *CORE, "--bpipe-executor"),
 "gpt_core": (*BATCH, *CORE, *SLICES),
 "llama_core": (*BATCH, *LLAMA, *CORE, *SLICES),
 "llama_full": (*BATCH, *LLAMA, *FULL, *SLICES),
 "llama_listed": (*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-slice-lengths", "24,18,12,10"),
 "gpt_none": (*BATCH, *SLICES),
 "llama_none": (*BATCH, *LLAMA, *SLICES),
 "llama_split": (*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-schedule", "zb-h1"),
 "llama_v2": (*BATCH, *LLAMA, *CORE, *SLICES, *V2),
}
def test_x(run_cases):
    report = ("--bpipe-report", "{folder}/CASE", "--bpipe-min-bytes", "1")
    done = run_cases(4, [Case(n, (*a, *(w.replace("CASE", n) for w in report))) for n, a in CASES.items()], 900)
    out = {}
    for n in CASES:
        out[n] = done.reports(n)
    json.dump(out, open("/tmp/pred_reports.json", "w"))
