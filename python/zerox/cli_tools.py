"""The subcommands that look at things: zerox doctor, zerox checkpoint show, zerox checkpoint consolidate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

COMMANDS = ("doctor", "checkpoint")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """ "5GB", "500 MB", "2GiB", "1_000" -> bytes."""
    cleaned = text.replace("_", "").replace(",", "").replace(" ", "").upper()
    digits = cleaned.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = _UNITS.get(cleaned[len(digits) :])
    try:
        value = int(float(digits) * unit) if unit else 0
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 5GB, 500MB or 2GiB")
    return value


def add_parsers(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The parsers of COMMANDS."""
    d = commands.add_parser(
        "doctor",
        help="what this machine has and lacks, and what to do",
        formatter_class=formatter,
        description="Looks at Python, the compiled core, BLAS, cores, memory, launcher and settings, CUDA, NCCL and "
        "optional packages, and trains three steps on two ranks. Exit code 0 when training on CPUs works, else 1.",
    )
    d.add_argument("--json", action="store_true", help="one line of JSON instead of the table")

    c = commands.add_parser("checkpoint", help="show what a checkpoint holds; take its weights elsewhere")
    actions = c.add_subparsers(dest="action", metavar="action", required=True)
    s = actions.add_parser("show", help="what a checkpoint holds", formatter_class=formatter)
    s.add_argument("path", type=Path, help="a checkpoint, or a folder of them (the newest is taken)")
    s.add_argument("--verify", action="store_true", help="also read all values and compare their checksums")
    o = actions.add_parser(
        "consolidate",
        help="write the weights as plain safetensors",
        formatter_class=formatter,
        description="Joins the shards into whole tensors, which other programs read. Checksums are compared.\n\n"
        "  zerox checkpoint consolidate run model.safetensors\n"
        "  zerox checkpoint consolidate run exported/ --max-shard-bytes 5GB",
    )
    o.add_argument("path", type=Path, help="a checkpoint, or a folder of them (the newest is taken)")
    o.add_argument("out", type=Path, help="a file that ends in .safetensors, or a folder")
    o.add_argument("--dtype", choices=("master", "stored"), default="master",
                   help="master: the fp32 copies of bf16 parameters; stored: what the model computes with")  # fmt: skip
    o.add_argument("--max-shard-bytes", type=parse_bytes, default=None, metavar="SIZE",
                   help="largest file, as in 5GB; several come with an index (default: one file)")  # fmt: skip
    o.add_argument("--overwrite", action="store_true", help="replace files of these names")


def run(args: argparse.Namespace) -> int:
    """Runs one of COMMANDS; -> exit code."""
    if args.command == "doctor":
        from zerox.doctor import report

        return report(as_json=args.json)
    if args.action == "show":
        from zerox.checkpoint.show import describe

        print(describe(args.path, verify=args.verify))
        return 0
    from zerox.checkpoint import consolidate
    from zerox.memory import human

    files = consolidate(
        args.path, args.out, dtype=args.dtype, max_shard_bytes=args.max_shard_bytes, overwrite=args.overwrite
    )
    for file in files:
        print(f"{file}  {human(file.stat().st_size)}")
    return 0
