"""The command oracle with real processes, and the space file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zkl_debug.bisect.criterion import judge
from zkl_debug.bisect.driver import bisect_switches
from zkl_debug.bisect.load import load_space, parse_space
from zkl_debug.bisect.oracle import CommandOracle, command_hash, environment_hash, last_object, switch_environment
from zkl_debug.bisect.outcome import Cancelled, Observation, Outcome, RawRun, Request, Trial
from zkl_debug.bisect.process import Limits, final_exception, resident_bytes
from zkl_debug.bisect.result import Role
from zkl_debug.bisect.space import Space, Switch
from zkl_debug.errors import UsageError

SPACE = Space((Switch("cublas.workspace"), Switch("fa4"), Switch("useless")))


def execute(tmp_path: Path, code: str, on: tuple[str, ...] = (), limits: Limits | None = None) -> RawRun:
    oracle = CommandOracle(SPACE, [sys.executable, "-S", "-c", code], tmp_path / "out", limits=limits)
    return oracle.run(Trial(Request(frozenset(on))))


def outcome(tmp_path: Path, code: str, limits: Limits | None = None) -> Observation:
    return judge(execute(tmp_path, code, limits=limits))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "expected", "reason"),
    [
        ("raise SystemExit(0)", Outcome.ZERO, ""),
        ("raise SystemExit(1)", Outcome.MISMATCH, ""),
        ("import sys; sys.exit(125)", Outcome.UNTESTABLE, "exit code 125"),
        ("import sys; sys.stderr.write('needs SM100\\n'); sys.exit(125)", Outcome.UNTESTABLE, "needs SM100"),
        ("raise SystemExit(4)", Outcome.UNTESTABLE, "does not repeat"),
        ("raise SystemExit(3)", Outcome.ERROR, "exit code 3"),
        ("import no_such_module", Outcome.ERROR, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("assert False, 'tensor_model_parallel'", Outcome.ERROR, "AssertionError"),
        ("def f(:", Outcome.ERROR, "SyntaxError"),
        ("import os; os.kill(os.getpid(), 11)", Outcome.ERROR, "SIGSEGV"),
        ("import os; os.abort()", Outcome.ERROR, "SIGABRT"),
        ("x = [None]; raise MemoryError", Outcome.ERROR, "out of memory"),
    ],
)
def test_exit_code_contract(tmp_path: Path, code: str, expected: Outcome, reason: str) -> None:
    seen = outcome(tmp_path, code)
    assert seen.outcome is expected
    assert reason in seen.reason


def test_timeout_ends_the_whole_tree(tmp_path: Path) -> None:
    """A child that ignores SIGTERM and one that left the process group are ended too."""
    code = (
        "import subprocess, sys, time, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "a = subprocess.Popen(sleep)\n"
        "b = subprocess.Popen(sleep, start_new_session=True)\n"
        "print(a.pid, b.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    raw = execute(tmp_path, code, limits=Limits(timeout=1.0, grace=0.3))
    assert time.monotonic() - start < 10
    assert raw.timed_out
    assert "timed out" in judge(raw).reason
    pids = [int(x) for x in (Path(raw.folder) / "stdout.txt").read_text().split()]
    assert len(pids) == 2
    assert not any(alive(p) for p in pids)


def test_what_a_finished_command_leaves_running_is_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid)\n"
    )
    raw = execute(tmp_path, code)
    assert judge(raw).outcome is Outcome.ZERO
    assert not any(alive(int(p)) for p in (Path(raw.folder) / "stdout.txt").read_text().split())


def test_memory_cap(tmp_path: Path) -> None:
    hog = "x = bytearray(400 << 20)"
    seen = outcome(tmp_path, hog, Limits(memory=150 << 20))
    assert (seen.outcome, seen.reason) == (Outcome.ERROR, "out of memory")
    assert outcome(tmp_path, hog, Limits(memory=4 << 30)).outcome is Outcome.ZERO


def test_memory_cap_counts_all_processes_of_a_run(tmp_path: Path) -> None:
    child = "import time; x = bytearray(60 << 20); time.sleep(60)"
    code = (
        "import subprocess, sys, time\n"
        f"p = [subprocess.Popen([sys.executable, '-S', '-c', {child!r}], start_new_session=i > 0) for i in range(3)]\n"
        "time.sleep(60)\n"
    )
    raw = execute(tmp_path, code, limits=Limits(memory=150 << 20, timeout=30, grace=0.2))
    assert raw.out_of_memory
    assert raw.peak_bytes > 150 << 20
    assert resident_bytes(os.getpid()) > 1 << 20


def test_missing_and_vanished_commands(tmp_path: Path) -> None:
    for command in ([], ["no-such-command-here"], ["./nothing"]):
        with pytest.raises(UsageError):
            CommandOracle(SPACE, command, tmp_path)
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    for limits in (None, Limits(memory=1 << 30)):
        raw = CommandOracle(SPACE, [str(script)], tmp_path / "out", limits=limits).run(Trial(Request(frozenset())))
        assert judge(raw).outcome is Outcome.ERROR


def test_closing_the_oracle_cancels_what_runs(tmp_path: Path) -> None:
    oracle = CommandOracle(SPACE, ["sleep", "600"], tmp_path, limits=Limits(grace=0.5))
    caught: list[BaseException] = []

    def target() -> None:
        try:
            oracle.run(Trial(Request(frozenset())))
        except Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    time.sleep(0.3)
    oracle.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(caught) == 1


def test_configuration_reaches_the_command(tmp_path: Path) -> None:
    code = (
        "import json, os\n"
        "keep = {k: v for k, v in os.environ.items() if k.startswith(('ZKL_', 'NVTE_X', 'HOME_X'))}\n"
        "keep['file'] = json.load(open(os.environ['ZKL_SWITCHES_FILE']))\n"
        "print('log line'); print(json.dumps(keep, indent=1))\n"
    )
    body = {
        "switches": [
            {"name": "cublas.workspace", "env": "NVTE_X"},
            {"name": "fa4", "env": [{"name": "HOME_X", "when_on": "four", "when_off": None}]},
        ]
    }
    space = parse_space(body)
    base = {**os.environ, "HOME_X": "user"}
    oracle = CommandOracle(space, [sys.executable, "-S", "-c", code], tmp_path, base_env=base)
    first = oracle.run(Trial(Request(frozenset({"fa4"}), repeat=2, wide=True), 1)).document
    second = oracle.run(Trial(Request(frozenset({"cublas.workspace"})))).document
    assert first is not None
    assert second is not None
    assert json.loads(first["ZKL_SWITCHES"]) == first["file"] == {"cublas.workspace": False, "fa4": True}
    assert (first["ZKL_SWITCH_CUBLAS_WORKSPACE"], first["ZKL_SWITCH_FA4"]) == ("0", "1")
    assert (first["NVTE_X"], first["HOME_X"]) == ("0", "four")
    assert (first["ZKL_PROBE_WIDE"], first["ZKL_REPEAT"], first["ZKL_ATTEMPT"]) == ("1", "2", "1")
    assert (second["NVTE_X"], second["ZKL_PROBE_WIDE"]) == ("1", "0")
    assert "HOME_X" not in second
    assert first["ZKL_RUN_DIR"] != second["ZKL_RUN_DIR"]
    assert Path(first["ZKL_RUN_DIR"]).parent == tmp_path


def test_shared_variable_belongs_to_what_is_on() -> None:
    body = {"switches": [{"name": x, "env": {"name": "MODE", "when_on": x, "when_off": None}} for x in "abc"]}
    space = parse_space(body)
    assert switch_environment(space, frozenset("a"), {})["MODE"] == "a"
    assert switch_environment(space, frozenset("ab"), {})["MODE"] == "b"
    assert "MODE" not in switch_environment(space, frozenset(), {"MODE": "x"})


def test_verdict_by_file_and_by_stdout(tmp_path: Path) -> None:
    verdict = {"format": "zkl-verdict", "version": 1, "verdict": "diverged", "edge": "score-prefill"}
    verdict["first"] = {"site": "decoder.layers.0:out"}
    by_file = f"import os; open(os.environ['ZKL_VERDICT_FILE'], 'w').write({json.dumps(verdict)!r})"
    by_stdout = f"print('noise'); print({json.dumps(verdict, indent=2)!r}); raise SystemExit(1)"
    for code in (by_file, by_stdout):
        seen = outcome(tmp_path, code)
        assert seen == Observation(Outcome.MISMATCH, "decoder.layers.0:out @ score-prefill")
    broken = "import os; open(os.environ['ZKL_VERDICT_FILE'], 'w').write('{')"
    assert outcome(tmp_path, broken).outcome is Outcome.ERROR


def test_last_object() -> None:
    assert last_object('log\n{"a": 1}\n') == {"a": 1}
    assert last_object('{"a": 1}\n{\n "b": 2\n}') == {"b": 2}
    assert last_object('{"a": 1}\nafter') is None
    assert last_object("{broken\n[1]") is None
    assert last_object("") is None


def test_final_exception() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'
    assert (
        final_exception(trace + "RuntimeError: CUDA error\nmore\nlines\n")
        == "Python exception: RuntimeError: CUDA error"
    )
    assert final_exception(trace + "torch.OutOfMemoryError: x") == "Python exception: torch.OutOfMemoryError: x"
    ranked = "".join(f"[rank0]: {line}\n" for line in (trace + "KeyError: 'a'").splitlines())
    assert final_exception(ranked) == "Python exception: KeyError: 'a'"
    # a traceback that was logged and survived is not the end
    assert final_exception(trace + "ValueError: x\n" + "step done\n" * 30) == ""
    assert final_exception("plain words\n") == ""
    assert final_exception("/usr/bin/python: No module named foo\n").startswith("Python exception")


def test_hashes(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text("1")
    first = command_hash(["python", "check.py"], tmp_path)
    assert first == command_hash(["python", "check.py"], tmp_path)
    script.write_text("2")
    assert first != command_hash(["python", "check.py"], tmp_path)
    assert environment_hash({"A": "1"}) == environment_hash({"A": "2"})
    assert environment_hash({"NVTE_A": "1"}) != environment_hash({"NVTE_A": "2"})
    assert environment_hash({"NVTE_A": "1"}, {"NVTE_A"}) == environment_hash({})


def test_bisect_with_real_processes_and_resume(tmp_path: Path) -> None:
    """OR of two switches through real processes, four at once; a crash of one switch is not a mismatch."""
    names = ["one", "two", "three", "crash", "four", "five"]
    space = Space(tuple(Switch(n) for n in names))
    script = tmp_path / "probe.sh"
    script.write_text(
        'echo run >> "$COUNT"\n'
        '[ "$ZKL_SWITCH_CRASH" = 1 ] && kill -SEGV $$\n'
        '[ "$ZKL_SWITCH_FOUR" = 1 ] && { [ "$ZKL_SWITCH_ONE" = 1 ] || [ "$ZKL_SWITCH_FIVE" = 1 ]; } && exit 0\n'
        "exit 1\n"
    )
    count = tmp_path / "count"
    base = {**os.environ, "COUNT": str(count)}

    def oracle() -> CommandOracle:
        return CommandOracle(space, ["sh", str(script)], tmp_path / "out", base_env=base)

    journal = tmp_path / "journal.jsonl"
    result = bisect_switches(space, oracle(), journal=journal, jobs=4)
    assert "four" in result.minimal
    assert result.with_role(Role.CORE) == ("four",)
    assert result.with_role(Role.REPLACEABLE) == ("one", "five")
    assert "SIGSEGV" in result.finding("crash").reason
    runs = len(count.read_text().splitlines())
    assert bisect_switches(space, oracle(), journal=journal) == result
    assert len(count.read_text().splitlines()) == runs


def test_sigkill_of_the_bisect_itself_resumes(tmp_path: Path) -> None:
    """kill -9 of a real bisect process in the middle; the next one repeats nothing that was journalled."""
    probe = tmp_path / "probe.sh"
    probe.write_text('echo "$ZKL_SWITCHES" >> "$COUNT"; sleep 0.1; [ "$ZKL_SWITCH_S3" = 1 ] && exit 0; exit 1\n')
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "from zkl_debug.bisect.driver import bisect_switches\n"
        "from zkl_debug.bisect.oracle import CommandOracle\n"
        "from zkl_debug.bisect.space import Space, Switch\n"
        "space = Space(tuple(Switch(f's{i}') for i in range(8)))\n"
        f"here = Path({str(tmp_path)!r})\n"
        "oracle = CommandOracle(space, ['sh', str(here / 'probe.sh')], here / 'out')\n"
        "result = bisect_switches(space, oracle, journal=here / 'journal.jsonl')\n"
        "print(result.minimal)\n"
    )
    count = tmp_path / "count"
    env = {**os.environ, "COUNT": str(count)}
    process = subprocess.Popen([sys.executable, str(driver)], env=env)
    deadline = time.monotonic() + 60
    while not (count.exists() and len(count.read_text().splitlines()) >= 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    done = len((tmp_path / "journal.jsonl").read_text().splitlines()) - 1
    before = len(count.read_text().splitlines())
    out = subprocess.run([sys.executable, str(driver)], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "('s3',)"
    lines = count.read_text().splitlines()
    assert done >= 3
    total = len((tmp_path / "journal.jsonl").read_text().splitlines()) - 1
    assert len(lines) - before == total - done


# ------------------------------------------------------------------------------------------------ space files


def test_space_file(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "version: 1\nswitches:\n"
        "  - plain\n"
        "  - {name: te, env: NVTE_X, requires: [plain], conflicts: other, alternatives: [other], doc: text}\n"
        "  - {name: other, untestable: needs SM100}\n"
        "  - {name: fixed, held: on}\n"
    )
    space = load_space(path)
    assert space.order == ("plain", "te", "other", "fixed")
    assert space.by_name["te"].env[0].name == "NVTE_X"
    assert space.by_name["fixed"].held is True
    assert space.excluded == {"other": "needs SM100"}
    assert space.digest() == load_space(path).digest()
    documented = path.read_text().replace("doc: text", "doc: other words")
    path.write_text(documented)
    assert space.digest() == load_space(path).digest()
    path.write_text(documented.replace("held: on", "held: off"))
    assert space.digest() != load_space(path).digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the space is missing"),
        ("[a", "is not YAML"),
        ("- a", "the space is a list"),
        ("switches: 3", "'switches' is a number"),
        ("switches: []", "no switches"),
        ("version: 9\nswitches: [a]", "version 9"),
        ("switchs: [a]", "did you mean 'switches'?"),
        ("switches: [a, a]", "share the variable"),
        ("switches: [a-b, a_b]", "share the variable"),
        ("switches: [on]", "switch 1 is a boolean"),
        ("switches: [{name: yes}]", "its name is a boolean"),
        ("switches: ['a b']", "not a switch name"),
        ("switches: [{name: a, require: [b]}]", "did you mean 'requires'?"),
        ("switches: [alpha, {name: b, requires: [alpa]}]", "did you mean 'alpha'?"),
        ("switches: [{name: a, requires: [b]}, {name: b, requires: [a]}]", "a -> b -> a"),
        ("switches: [a, {name: b, requires: [a], conflicts: [a]}]", "can never be on"),
        ("switches: [{name: a, requires: [a]}]", "names itself"),
        ("switches: [{name: a, held: maybe}]", "held is 'maybe'"),
        ("switches: [{name: a, held: on, untestable: no GPU}]", "both untestable and held on"),
        ("switches: [{name: a, untestable: true}]", "untestable is a boolean"),
        ("switches: [{name: a, env: 3}]", "env is a number"),
        ("switches: [{name: a, env: {name: X, when_on: true}}]", "when_on = True"),
        ("switches: [{name: a, env: ZKL_RUN_DIR}]", "cannot be bound"),
        ("switches: [{name: a, name: b}]", "given twice"),
        ("switches: [&x a, *x]", "aliases"),
        ("switches: [a, {name: b, held: on, requires: [a]}]", "held on but requires"),
        ("switches: [{name: a, held: on, conflicts: [b]}, {name: b, held: on}]", "held on conflict"),
        ("switches: !!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_bad_space_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_space(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_space_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_space(tmp_path / "missing.yaml")
    (tmp_path / "big.yaml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="at most"):
        load_space(tmp_path / "big.yaml")
