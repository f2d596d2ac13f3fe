"""The command line: list, build, run, doctor. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from shardlab.course.find import choose_labs, find_course, find_labs
from shardlab.errors import ShardLabError, UsageError, quiet_exit


class Parser(argparse.ArgumentParser):
    """argparse, with its complaint as our one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 well, 1 something failed, 2 bad input."""
    try:
        chosen = parser().parse_args(arguments)
        return chosen.command(chosen)
    except ShardLabError as error:
        return quiet_exit(error)
    except KeyboardInterrupt:
        print("shardlab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> Parser:
    """The commands and their options."""
    top = Parser(prog="shardlab", description="ShardLab: data-parallel training by hand, on real processes.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="the labs of the course")
    listing.add_argument("--names", action="store_true", help="only their names, one a line")
    listing.set_defaults(command=_list)

    build = commands.add_parser("build", help="make the notebooks from their sources")
    build.add_argument("labs", nargs="*", metavar="LAB", help="a lab's name or number; all labs if none is given")
    build.add_argument("--check", action="store_true", help="write nothing, exit 1 if a notebook is not in step")
    build.add_argument("--force", action="store_true", help="execute all cells again; replace a lab edited by hand")
    build.add_argument("--from-notebook", action="store_true", help="first take the notebook's cells into the .py")
    build.add_argument("--from-source", action="store_true", help="give up edits made in the solution notebook")
    build.add_argument("--timeout", type=_seconds, default=600, metavar="SECONDS", help="for a notebook (default 600)")
    build.set_defaults(command=_build)

    run = commands.add_parser("run", help="run the labs' solutions and tell how they went")
    run.add_argument("labs", nargs="*", metavar="LAB", help="a lab's name or number; all labs if none is given")
    run.add_argument("--world-size", nargs="+", type=_ranks, default=[4], metavar="N", help="ranks (default 4)")
    run.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    run.add_argument("--out", type=Path, metavar="DIR", help="where executed notebooks are kept (default: out/)")
    run.add_argument("--timeout", type=_seconds, default=600, metavar="SECONDS", help="for a notebook (default 600)")
    run.add_argument("--unsolved", action="store_true", help="run labs/ as a learner gets them: each must stop cleanly")
    run.set_defaults(command=_run)

    doctor = commands.add_parser("doctor", help="what this machine can do")
    doctor.set_defaults(command=_doctor)
    return top


def _list(chosen: argparse.Namespace) -> int:
    labs = find_labs()
    width = max((len(lab.name) for lab in labs), default=0)
    for lab in labs:
        print(lab.name if chosen.names else f"{lab.name.ljust(width)}  {lab.title}".rstrip())
    return 0


def _build(chosen: argparse.Namespace) -> int:
    from shardlab.course import build

    modes = [name for name in ("check", "from_notebook", "from_source") if getattr(chosen, name)]
    if len(modes) > 1:
        raise UsageError(f"--{modes[0].replace('_', '-')} and --{modes[1].replace('_', '-')} exclude each other")
    if modes and modes[0] != "check" and not chosen.labs:
        raise UsageError(f"--{modes[0].replace('_', '-')} needs the name of a lab")
    failed = False
    for lab in choose_labs(chosen.labs):
        if chosen.check:
            problems = build.check(lab)
            for problem in problems:
                print(f"{problem} (run: make build)")
            print(f"{lab.name}: {'not in step' if problems else 'in step'}")
            failed |= bool(problems)
            continue
        if chosen.from_notebook and build.take_from_notebook(lab):
            print(f"{lab.name}: solutions/{lab.source.name} written from the notebook")
        if chosen.from_source:
            build.take_from_source(lab)
        built = build.build(lab, force=chosen.force, timeout=chosen.timeout)
        print(f"{lab.name}: {built.problem or built.done}", flush=True)
        failed |= bool(built.problem)
    return int(failed)


def _run(chosen: argparse.Namespace) -> int:
    from shardlab.course.run import run, table

    out = (chosen.out or find_course() / "out").resolve()
    results = []
    for lab in choose_labs(chosen.labs):
        for world_size in chosen.world_size:
            print(f"{lab.name}, world size {world_size} ...", flush=True)
            result = run(lab, world_size, chosen.device, out, timeout=chosen.timeout, unsolved=chosen.unsolved)
            results.append(result)
            if not result.ok:
                print(f"  {result.note}\n  kept in {result.output}", flush=True)
            if result.world_size is None:
                break  # one run is all there is to see
    print(f"\n{table(results)}")
    return int(not all(result.ok for result in results))


def _doctor(chosen: argparse.Namespace) -> int:
    from shardlab.course.doctor import examine, report

    findings = examine()
    print(report(findings))
    return int(any(finding.problem for finding in findings))


def _ranks(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"a world size is a whole number of ranks, 1 or more, not {text!r}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < float("inf"):
        return seconds
    raise argparse.ArgumentTypeError(f"a time-out is a number of seconds above 0, not {text!r}")
