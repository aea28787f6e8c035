"""An operator's own checks, in an installed package that processes find if ``PYTHONPATH`` names its folder."""

from pathlib import Path
from textwrap import dedent
from typing import Final

MARKER: Final = "Quetzalcoatl"
"""A word that the checks print, raise or return against the rules. It may appear nowhere."""

_CHECKS: Final = f"""
    import os, re, sys, time
    from kp_scorer import Findings, ReasoningTrace

    def count_steps(trace: ReasoningTrace) -> Findings:
        return Findings(kinds={{"step": len(trace.steps)}}, numbers={{"mean_chars": 12.5}})

    def misbehave(trace: ReasoningTrace) -> object:
        print("{MARKER}", trace.task.objective, file=sys.stderr)
        match trace.task.objective.split()[0]:
            case "raise":
                raise ValueError("{MARKER} " + trace.task.objective)
            case "exit":
                os._exit(0)
            case "leave":
                sys.exit("{MARKER}")
            case "loop":
                re.fullmatch("(a+)+b", "a" * 64)
            case "fork":
                if os.fork() == 0:
                    sys.exit("{MARKER}")
            case "eat":
                return bytearray(3 << 30)
            case "quote":
                return {{"kinds": {{"{MARKER}": 1}}}}
            case "infinite":
                return {{"numbers": {{"score": float("inf")}}}}
            case "many":
                return {{"kinds": {{f"kind-{{number}}": 1 for number in range(1_000)}}}}
            case "nothing":
                return None
        return Findings(outcome="rejected")

    def look_around(trace: ReasoningTrace) -> Findings:
        variables = {{name.lower(): 1 for name in os.environ if name.upper().startswith("KP_")}}
        return Findings(kinds=variables, numbers={{"pid": os.getpid()}})

    def versioned(trace: ReasoningTrace) -> Findings:
        return Findings()

    versioned.version = "1.0 beta"
"""
NAMES: Final = ("count_steps", "misbehave", "look_around", "versioned")


def install(directory: Path) -> str:
    """Put the package into a folder, as pip would; return the folder's name."""
    (directory / "clinic_checks.py").write_text(dedent(_CHECKS), "utf-8")
    (directory / "broken_checks.py").write_text("import a_package_that_nobody_has\n", "utf-8")
    metadata = directory / "clinic_checks-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: clinic-checks\nVersion: 3.1\n", "utf-8")
    entries = [f"{name} = clinic_checks:{name}" for name in NAMES] + ["broken = broken_checks:check"]
    (metadata / "entry_points.txt").write_text("\n".join(["[kp_scorer.checks]", *entries, ""]), "utf-8")
    return str(directory)
