"""`zeromesh verify`: starts the ranks of a verification, or is one of them."""

import argparse
import json
import sys
from pathlib import Path

from zeromesh.environment import die_with_launcher, read_environment
from zeromesh.errors import ConfigError
from zeromesh.files import refusals
from zeromesh.trainer.cli import train
from zeromesh.trainer.config.consent import Consent
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig


def run_verify(options: argparse.Namespace) -> int:
    """Verify the layout of a configuration; returns 0 where it computes what one process does, and 1 where it does not.

    Raises:
        ConfigError: for a configuration, a check or numbers of ranks that cannot be.
        StorageError: when the certificate cannot be written.
    """
    from zeromesh.launch.rank_processes import become_worker
    from zeromesh.launch.rendezvous import launch_workers

    if options.worker:
        die_with_launcher()
        become_worker(train.exit_code_of)
    environment = read_environment()
    processes = train.processes_of(options, environment)
    config = load_config(options.config, options.overrides, ranks=processes, consent=Consent.NEVER)
    train.check_mesh(config, processes)
    out = options.out or Path(config.run.output_dir).expanduser() / config.run.name / "certificate.json"
    if options.worker or processes == environment.world_size:
        return _verify_here(config, options.check, out, quiet=options.worker)
    with refusals(out, "written"):
        out.unlink(missing_ok=True)
    ended = train.report(launch_workers(train.same_command(options), processes=processes))
    return ended or int(not json.loads(out.read_text(encoding="utf-8"))["passed"])


def checks_of(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _verify_here(config: TrainerConfig, checks: tuple[str, ...], out: Path, *, quiet: bool) -> int:
    """The part of one rank. A worker's exit code says whether it has come to its end; what it found is in the certificate."""
    from zeromesh.trainer import Trainer
    from zeromesh.trainer.verification.verify import CHECKS

    unknown = [name for name in checks if name not in CHECKS]
    if unknown:
        raise ConfigError(f"--check {','.join(unknown)}: there are {', '.join(CHECKS)}")
    with Trainer(config=config) as trainer:
        certificate = trainer.verify(checks=checks, out=out)
        if trainer.mesh.rank == 0:
            sys.stdout.writelines(f"{line}\n" for line in (*certificate.lines(), f"written: {out}"))
            sys.stdout.flush()
    return 0 if quiet else int(not certificate.passed)
