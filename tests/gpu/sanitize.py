"""The kernels under compute-sanitizer: memcheck, initcheck, synccheck and racecheck over tests/gpu/sanitizer_set.py.

    python3 tests/gpu/sanitize.py            (or `make sanitize`)

Each tool has a time limit of its own, and first has to find a fault that was planted for it: one that does not look
would find nothing either. Writes one JSON file, by default to benchmarks/results/sanitizer/, with tool version, GPU,
commit and for every run its cases, launches, reports and seconds; prints the same as a table. Exit status 1 if anything
was reported, a result was wrong, or a tool saw nothing of its planted fault. What a tool refuses or cuts off is said,
and is no failure of the kernels: a run that ended without having looked at all its cases says how many of how many.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Tool, families, options of sanitizer_set.py. Racecheck by family: it may not know all that one of them uses.
RUNS = (
    ("racecheck", "portable", ("--few", "--every-lane")),
    ("racecheck", "hopper", ("--few", "--every-lane")),
    ("memcheck", "portable unpack", ()),
    ("memcheck", "hopper", ()),
    ("initcheck", "portable unpack", ()),
    ("initcheck", "hopper", ()),
    ("synccheck", "portable unpack", ()),
    ("synccheck", "hopper", ()),
)
TOOLS = tuple(dict.fromkeys(tool for tool, *_ in RUNS))
# The Python bindings ask an older driver for functions that it lacks; that is no fault of a kernel.
OPTIONS = {"memcheck": ("--report-api-errors", "no")}


def run(tool: str, arguments: tuple[str, ...], limit: float) -> dict[str, Any]:
    """sanitizer_set.py with `arguments` under `tool`: what it said, in short."""
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, ()), "--print-limit", "20"]
    command += [sys.executable, str(HERE / "sanitizer_set.py"), *arguments]
    started = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    ) as process:
        try:
            output, status = process.communicate(timeout=limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the program under the tool, too
            output, status = process.communicate()[0], None
    return {"status": status, "seconds": round(time.monotonic() - started, 1), **summary(output)}


def summary(output: str) -> dict[str, Any]:
    """The numbers in what a tool and its program wrote: `reports` (None if the tool gave no summary), the counts of
    sanitizer_set.py, and the first lines of whatever went wrong."""
    lines = output.splitlines()
    told = [line.removeprefix("=========").strip() for line in lines if line.startswith("=========")]
    found: dict[str, Any] = {"reports": None}
    for line in told:
        if match := re.match(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed", line):
            found["reports"] = int(match[1] or match[2])
    counts = [line for line in lines if line.startswith('{"cases"')]
    if counts:
        found["counts"] = json.loads(counts[-1])
    quiet = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|^$")
    said = [line for line in told if not quiet.search(line)]
    if said:
        found["said"] = said[:12]
    if "Traceback" in output:
        trace = [line for line in output[output.rindex("Traceback") :].splitlines() if not line.startswith("=========")]
        found["failed"] = "\n".join(trace).strip().splitlines()[-1][:500]
    return found


def verdict(result: dict[str, Any]) -> str:
    """One word or a few for a run; "clean" only if everything that was to be looked at was, and nothing was found."""
    counts = result.get("counts")
    if result.get("failed"):
        return f"failed: {result['failed']}"
    if result["reports"]:
        return f"{result['reports']} reports"
    if result["status"] is None:
        return "out of time"
    if result["reports"] is None or counts is None:
        return "the tool gave no summary"
    if counts["cases"] < counts["of"]:
        return f"clean, but only {counts['cases']} of {counts['of']} cases in the time"
    return "clean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sanitizer")
    parser.add_argument("--seconds", type=float, default=25, help="of cases in a run; the start of python comes on top")
    parser.add_argument("--limit", type=float, default=75, help="seconds after which a run is ended")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    head = facts()
    compiled = output_of(str(HERE / "sanitizer_set.py"), "--compile")
    if "racecheck" in arguments.tools:
        output_of(str(HERE / "sanitizer_set.py"), "--compile", "--every-lane")
    print(f"{head['gpu']}, {head['sanitizer']}, commit {head['commit']}; {compiled}", flush=True)
    jobs = []
    for tool, families, options in RUNS:
        if tool in arguments.tools and ("hopper" not in families or head["capability"] == "9.0"):
            how = (*options, "--seconds", f"{arguments.seconds:g}", "--families", *families.split())
            jobs.append((tool, families, how))
    jobs += [(tool, "planted", ("--plant", tool)) for tool in arguments.tools]
    with ThreadPoolExecutor(arguments.jobs) as workers:
        results = list(workers.map(lambda job: run(job[0], job[2], arguments.limit), jobs))
    bad, rows = 0, []
    for (tool, families, options), result in zip(jobs, results, strict=True):
        if families == "planted":
            word = "found" if result["reports"] else "NOT SEEN"
            result.pop("failed", None)  # a planted fault may well end its process
        else:
            word = verdict(result)
        bad += word == "NOT SEEN" or word.startswith("failed") or (families != "planted" and bool(result["reports"]))
        rows.append({"tool": tool, "what": families, "options": " ".join(options), "outcome": word, **result})
        launches = sum(result.get("counts", {}).get("launches", {}).values())
        print(f"{tool:10} {families:16} {launches:5} launches {result['seconds']:6.1f} s  {word}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", head["gpu"].lower()).strip("_")
    path = arguments.out / f"{name}-{head['date'][:10]}.json"
    path.write_text(json.dumps({**head, "runs": rows}, indent=1) + "\n")
    print(f"written to {path}")
    sys.exit(bool(bad))


def facts() -> dict[str, str]:
    """What was run on, and what. In a process of its own, so that this one holds no context on the GPU."""
    program = (
        "import json, torch; from spearfish.bench import results as r; "
        "print(json.dumps({'gpu': torch.cuda.get_device_name(0), 'torch': torch.__version__,"
        " 'capability': '%d.%d' % torch.cuda.get_device_capability(0),"
        " 'cuda': torch.version.cuda, 'commit': r._commit(), 'sources': r._sources_digest()}))"
    )
    said = json.loads(output_of("-c", program))
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout.split()
    number = next((word for word in version if re.match(r"\d+\.\d+", word)), "of unknown version")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "sanitizer": f"compute-sanitizer {number}", **said}


def environment() -> dict[str, str]:
    """With this checkout's sources in front."""
    paths = [str(ROOT / "src"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def output_of(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment()).stdout.strip()


if __name__ == "__main__":
    main()
