"""The command line: zerox train, evaluate, generate, run, tour, doctor, checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zerox
from zerox import cli_tools

if TYPE_CHECKING:
    from zerox.engine import Engine

# name: GPT shape and what suits it; context also is the default length of a sequence
PRESETS: dict[str, dict[str, Any]] = {
    "2M": {"layers": 4, "heads": 4, "channels": 208, "context": 128},
    "10M": {"layers": 6, "heads": 6, "channels": 384, "context": 256},
    "25M": {"layers": 8, "heads": 8, "channels": 512, "context": 256},
}


def _number(text: str, low: int) -> int:
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"{text} is below {low}")
    return value


def _whole(text: str) -> int:
    return _number(text, 1)


def _natural(text: str) -> int:
    return _number(text, 0)


def _port(text: str) -> int:
    value = _number(text, 0)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number from 0 up")
    return value


def _positive(text: str) -> float:
    value = _real(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _add_engine_options(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("where it runs")
    g.add_argument("--ranks", type=_whole, default=1, help="processes that share the model and the data")
    g.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=3,
                   help="what is sharded over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
                        "parameters")  # fmt: skip
    g.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                   help="of parameters and activations; bf16 halves their memory but is slow on CPUs")  # fmt: skip
    g.add_argument(
        "--threads", type=_whole, default=None, help="threads of each rank (default: its share of the cores)"
    )
    g.add_argument("--timeout", type=_positive, default=None, help="seconds to wait for another rank (default: 300)")


def _add_data_options(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("data")
    g.add_argument("--data", default=None, metavar="PATH",
                   help="text file or folder (default: the Python standard library's sources)")  # fmt: skip
    g.add_argument("--batch", type=_whole, default=8, help="sequences in a rank's micro-batch")
    g.add_argument("--seq", type=_whole, default=None, help="tokens in a sequence (default: the model's context)")
    g.add_argument("--mode", choices=("packed", "equal"), default="packed",
                   help="packed: documents do not see each other; equal: rows of the joined text")  # fmt: skip
    g.add_argument("--eval-tokens", type=_whole, default=65536, help="tokens of the validation part to evaluate on")
    g.add_argument("--seed", type=_natural, default=0, help="of initial weights and of the order of the data")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="zerox", description=zerox.__doc__, formatter_class=_Formatter)
    p.add_argument("--version", action="version", version=f"zerox {zerox.__version__}")
    commands = p.add_subparsers(dest="command", metavar="command", required=True)

    t = commands.add_parser(
        "train",
        help="train a GPT on text",
        formatter_class=_Formatter,
        description="Trains a byte-level GPT on text. Progress is one line; every step is a row of OUT/log.csv; "
        "checkpoints are OUT/step-*.\n\n  zerox train --out run --data my_texts/ --minutes 10 --ranks 2",
    )
    t.add_argument("--out", type=Path, required=True, help="folder for log and checkpoints")
    t.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    m = t.add_argument_group("model")
    m.add_argument("--preset", choices=tuple(PRESETS), default="2M", help="shape of the GPT, about so many parameters")
    for name in ("layers", "heads", "channels", "context"):
        m.add_argument(f"--{name}", type=_whole, default=None, help="instead of the preset's")
    _add_data_options(t)
    s = t.add_argument_group("training")
    s.add_argument("--steps", type=_whole, default=1000, help="optimizer steps")
    s.add_argument("--minutes", type=_positive, default=None, help="stop after so many minutes, if that is earlier")
    s.add_argument("--accumulate", type=_whole, default=1, help="micro-batches in a step")
    s.add_argument("--lr", type=_positive, default=1e-3, help="largest learning rate")
    s.add_argument(
        "--warmup", type=_natural, default=50, help="steps until it is reached; then a cosine down to a tenth"
    )
    s.add_argument("--weight-decay", type=_real, default=0.1, help="of matrices")
    s.add_argument("--clip", type=_positive, default=1.0, help="largest gradient norm")
    s.add_argument("--recompute", action="store_true", help="recompute activations in backward instead of keeping them")
    s.add_argument("--eval-every", type=_natural, default=250, help="steps between evaluations; 0 = only at the end")
    s.add_argument("--save-every", type=_natural, default=0, help="steps between checkpoints; 0 = only at the end")
    s.add_argument("--keep", type=_whole, default=3, help="checkpoints that stay")
    s.add_argument("--plot", action="store_true", help="draw the loss curve as OUT/loss.png (needs matplotlib)")
    _add_engine_options(t)

    e = commands.add_parser("evaluate", help="validation loss of a checkpoint", formatter_class=_Formatter)
    e.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them (the newest is taken)")
    _add_data_options(e)
    _add_engine_options(e)

    g = commands.add_parser("generate", help="continue a text with a trained model", formatter_class=_Formatter)
    g.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them (the newest is taken)")
    g.add_argument("--prompt", default="def ", help="text to continue")
    g.add_argument("--tokens", type=_natural, default=200, help="how many to add")
    g.add_argument("--temperature", type=_real, default=0.8, help="0 takes the likeliest")
    g.add_argument("--top-k", type=_natural, default=0, help="choose among so many; 0 = all")
    g.add_argument("--seed", type=_natural, default=0, help="of the choice")
    _add_engine_options(g)

    r = commands.add_parser(
        "run",
        help="start a script on several processes",
        formatter_class=_Formatter,
        description="Starts a Python script (or -m module) once for each rank, with torchrun's environment variables.",
    )
    r.add_argument("-n", "--ranks", type=_whole, default=1, help="processes")
    r.add_argument("--port", type=_port, default=0, help="where they meet; 0 = any free one")
    r.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module instead, and its arguments")
    r.add_argument("script", nargs=argparse.REMAINDER, help="script.py and its arguments")

    o = commands.add_parser(
        "tour",
        help="the whole way in some minutes: train on two processes, save, load on one and three, sample",
        formatter_class=_Formatter,
    )
    o.add_argument("--minutes", type=_positive, default=4.0, help="of training")
    o.add_argument("--out", type=Path, default=Path("runs/tour"), help="folder; an older tour in it is replaced")
    cli_tools.add_parsers(commands, _Formatter)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    try:
        if args.command in cli_tools.COMMANDS:
            return cli_tools.run(args)
        if args.command == "tour":
            from zerox.tour import tour

            return tour(args.out, minutes=args.minutes)
        if args.command == "run":
            from zerox.launcher import run

            command = ["-m", *args.module] if args.module else args.script
            if not command:
                raise SystemExit("zerox run: name a script: zerox run -n 2 script.py")
            return run([sys.executable, *command], args.ranks, port=args.port)
        if args.command == "train" and not _launched():
            _check_out(args)
        if args.ranks > 1 and not _launched():
            from zerox.launcher import run

            return run([sys.executable, "-m", "zerox", *arguments], args.ranks)
        return {"train": _train, "evaluate": _evaluate, "generate": _generate}[args.command](args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("ZEROX_LOG") == "debug":
            raise
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        sys.stderr.write(f"zerox{rank}: {type(error).__name__}: {error}\n")  # one write: ranks share the stream
        return 1


def _launched() -> bool:
    """Whether zerox run, torchrun, Slurm or Open MPI started this process as one of several ranks, or says so."""
    from zerox.distributed import place_from_environment

    return "RANK" in os.environ or place_from_environment().world > 1


def _check_out(args: argparse.Namespace) -> None:
    """Whether OUT fits --resume; asked once, before any rank is started."""
    from zerox.checkpoint import CheckpointError, find

    try:
        newest = find(args.out).name
    except CheckpointError:
        newest = ""
    if args.resume and not newest:
        raise SystemExit(f"zerox train: {args.out} holds no checkpoint to go on from: leave --resume out")
    if newest and not args.resume:
        raise SystemExit(f"zerox train: {args.out} holds {newest}: go on with --resume, or choose another folder")


def _train(args: argparse.Namespace) -> int:
    from zerox.models import GPT, GPTConfig
    from zerox.optim import AdamW, Schedule
    from zerox.plotting import plot_losses, require_matplotlib
    from zerox.training import TrainOptions, open_corpus, train, write_summary

    if _launched() and not args.resume:  # started by a launcher that has not looked
        _check_out(args)
    shape = {k: getattr(args, k) or v for k, v in PRESETS[args.preset].items()}
    config = GPTConfig(**shape)
    if args.plot:
        require_matplotlib()
    warmup = min(args.warmup, args.steps - 1)
    engine = _engine(
        args,
        GPT(config),
        AdamW(lr=args.lr, weight_decay=args.weight_decay),
        schedule=Schedule(kind="cosine", warmup=warmup, total=args.steps),
        clip=args.clip,
        recompute=args.recompute,
        seed=args.seed,
    )
    options = TrainOptions(
        out=args.out,
        steps=args.steps,
        minutes=args.minutes,
        micro_batch=args.batch,
        seq_len=args.seq or config.context,
        accumulate=args.accumulate,
        mode=args.mode,
        seed=args.seed,
        eval_every=args.eval_every,
        eval_tokens=args.eval_tokens,
        save_every=args.save_every,
        keep=args.keep,
    )
    with engine:
        if engine.comm.rank == 0:
            text = args.data or "Python's standard library"
            print(f"{engine!r} on {text}, transport {engine.comm.transport}", file=sys.stderr)
        summary = train(engine, open_corpus(args.data), options, resume=args.resume)
        if engine.comm.rank == 0:
            write_summary(args.out / "summary.json", summary)
            if args.plot:
                plot_losses(args.out / "log.csv", args.out / "loss.png")
    return 0


def _engine(args: argparse.Namespace, model: Any, optimizer: Any = None, **options: Any) -> Engine:
    from zerox.distributed import connect
    from zerox.engine import Engine

    comm = connect(threads=args.threads, timeout=args.timeout)
    try:
        if args.ranks not in (1, comm.world):
            raise ValueError(f"--ranks {args.ranks}, but the launcher started {comm.world} (WORLD_SIZE): leave it out")
        engine = Engine(model, optimizer, comm=comm, zero=args.zero, precision=args.precision, **options)
    except BaseException:
        comm.close()
        raise
    engine.adopt_comm()
    return engine


def _load(args: argparse.Namespace) -> Engine:
    """The model of a checkpoint, with its weights."""
    from zerox.checkpoint import find
    from zerox.checkpoint.manifest import CheckpointError, read_manifest
    from zerox.models import GPT, GPTConfig

    where = find(args.checkpoint)
    shape = dict(read_manifest(where).model)
    if shape.pop("type", None) != "gpt":
        raise CheckpointError(f"{where} does not say which model it is of: load it in Python with engine.load")
    engine = _engine(args, GPT(GPTConfig(**shape)), init=False)
    engine.load(where, optimizer=False)
    return engine


def _evaluate(args: argparse.Namespace) -> int:
    from zerox.data import Loader
    from zerox.training import open_corpus

    with _load(args) as engine:
        _, validation = open_corpus(args.data).split()
        loader = Loader(
            validation,
            seq_len=args.seq or engine.model.config.context,
            micro_batch=args.batch,
            mode=args.mode,
            seed=args.seed,
            rank=engine.comm.rank,
            world=engine.comm.world,
        )
        loss = engine.evaluate(loader.once(max_tokens=args.eval_tokens))
        if engine.comm.rank == 0:
            print(json.dumps({"valid_loss": loss, "ranks": engine.comm.world, "checkpoint": str(args.checkpoint)}))
    return 0


def _generate(args: argparse.Namespace) -> int:
    with _load(args) as engine:
        text = engine.generate(args.prompt, args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
        if engine.comm.rank == 0:
            print(text)
    return 0
