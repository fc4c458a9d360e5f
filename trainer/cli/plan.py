"""`zeromesh plan`, which finds layouts or measures the machine, and `verify`, which compares steps with one plain process."""

import argparse
import json
import shutil
import sys
from contextlib import closing

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError
from zeromesh.files import refusals
from zeromesh.trainer.cli import train
from zeromesh.trainer.config.load import Consent, load_config
from zeromesh.trainer.formatting import print_lines

_WAIT_SECONDS = 300.0  # for a rank that measures, while the others wait


def run_plan(options: argparse.Namespace) -> int:
    """Plan a configuration, or measure the machine with `--measure`; returns the exit code: 1 where no layout fits."""
    if options.measure:
        if options.config is not None:
            raise ConfigError(f"--measure plans nothing: leave {options.config} out, and plan it afterwards")
        return _measure(options)
    if options.config is None:
        raise ConfigError("give the configuration that is to be planned, or --measure")
    from zeromesh.trainer.planning.auto import plan_config
    from zeromesh.trainer.planning.report import plan_json, plan_lines

    config = load_config(options.config, options.overrides, ranks=options.ranks, consent=Consent.NEVER)
    plan, more = plan_config(
        config, options.overrides, device=options.device, ranks=options.ranks, host=options.host, more=not options.json
    )
    if options.json:
        print_lines(json.dumps(plan_json(plan), indent=1).splitlines())
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print_lines(plan_lines(plan, shown=options.top, more=more, width=width))
    return 0 if plan.best is not None else 1


def _measure(options: argparse.Namespace) -> int:
    from zeromesh.trainer.planning.auto import ranks_here

    environment = read_environment()
    launched = environment.launcher == "torchrun" or environment.world_size > 1
    if launched and options.ranks not in (None, environment.world_size):
        why = f"--ranks {options.ranks}: {environment.launcher} has started {environment.world_size} ranks"
        raise ConfigError(f"{why}, which measure; leave --ranks out")
    ranks = environment.world_size if launched else options.ranks or ranks_here()
    if not options.worker and not launched and ranks > 1:
        return train.report(train.launch_this_command(options, ranks))
    import zeromesh.trainer.trainer  # noqa: F401  # The measured memory includes a run's imports.
    from zeromesh.mesh.mesh_shape import MeshShape
    from zeromesh.mesh.process_mesh import ProcessMesh
    from zeromesh.offload import reuse_freed_memory
    from zeromesh.offload.accelerator import pick_device
    from zeromesh.trainer.planning.machine import machine_file, write_machine
    from zeromesh.trainer.planning.measure import TINY_SIZES, measure_machine

    reuse_freed_memory()
    device = pick_device(environment.local_rank)
    shape = MeshShape(shard=environment.world_size)
    with closing(ProcessMesh(shape, environment, device=device, timeout_seconds=_WAIT_SECONDS)) as mesh:
        machine = measure_machine(mesh, options.directory, train.say, TINY_SIZES if options.tiny else None)
        if mesh.rank == 0:
            path = options.out or machine_file()
            write_machine(machine, path)
            sys.stdout.write(f"written: {path}, which says what was measured\n")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Verify a layout; returns 1 where it differs from a plain process. A worker returns 0; the certificate has the differences."""
    processes, starts = train.ranks_of(options)
    config = load_config(options.config, options.overrides, ranks=processes, consent=Consent.NEVER)
    train.check_mesh(config, processes)
    out = options.out or config.run.directory / "certificate.json"
    if starts:
        with refusals(out, "written"):
            out.unlink(missing_ok=True)
        ended = train.report(train.launch_this_command(options, processes))
        return ended or int(not json.loads(out.read_text(encoding="utf-8"))["passed"])
    from zeromesh.trainer import Trainer

    with Trainer(config=config) as trainer:
        certificate = trainer.verify(checks=options.check, out=out)
        if trainer.mesh.rank == 0:
            print_lines([*certificate.lines(), f"written: {out}"])
    return 0 if options.worker else int(not certificate.passed)
