"""`--on ray`: Ray places an actor on each node, the launcher of the node's ranks, and this process leads them over their lines.

A node that is lost takes its actor along. The ranks that are left go on by themselves; Ray starts the actor again on another node,
when there is one, and its launcher joins like any host that comes later. Losing this process, or Ray's head, ends the run."""

import os
import random
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeromesh.environment import READ, SECRET, export, setting
from zeromesh.errors import ConfigError, counted, errors_as
from zeromesh.launch.leader import Leader, Nodes, Notify, Result
from zeromesh.launch.messages import REST_SECONDS
from zeromesh.launch.rendezvous import Follower, run_starts
from zeromesh.launch.signals import noted_signals
from zeromesh.launch.ssh import PORTS
from zeromesh.mesh.network_interfaces import listen

_PLACE_SECONDS = 10.0  # for Ray to place the actors, before a line says what is waited for
_IMPORT_SECONDS = 60.0  # for the launchers of all nodes to join the first start, which have begun to import together
_END_SECONDS = 5.0  # for the actors to end after the run


class RayLauncher:
    """The launcher of one node's ranks, in an actor of Ray."""

    def run(self, work: tuple[Any, ...], directory: str, variables: Mapping[str, str], notify: Notify) -> Result:
        """Run `work`: Python's arguments, how many ranks, the `Nodes`, files as read and imports, until the run is over."""
        os.chdir(directory)
        export(variables)
        arguments, processes, nodes, files, imported = work
        READ.update(files)
        with noted_signals() as requests:
            return run_starts(arguments, Follower(nodes, processes, notify, lambda: bool(requests.first)), requests, **imported)


def launch_on_ray(
    argv: Sequence[str], processes: int, nodes: Nodes, env: Mapping[str, str], notify: Notify, **imported: Any
) -> Result:
    """Run `python ARGUMENTS` as `processes` ranks on each of `nodes.most` nodes of a Ray cluster, with `env`, and go on while
    `nodes.least` of them are left, if that is less, or one. Returns as `launch_workers` does. Raises `ConfigError` without Ray, and
    on a client outside of the cluster, which the nodes cannot reach."""
    with errors_as(ConfigError, "--on ray needs one more package: pip install 'zeromesh[ray]' (", ImportError, after=")"):
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    if (setting("RAY_ADDRESS") or "").startswith("ray://"):
        raise ConfigError("--on ray: RAY_ADDRESS is that of Ray's client; start the command on a node, or by `ray job submit`")
    ray.init()
    gpus = processes if ray.cluster_resources().get("GPU") else 0
    bundle = {"CPU": processes, "GPU": gpus} if gpus else {"CPU": processes}
    group = placement_group([bundle] * nodes.most, strategy="STRICT_SPREAD")
    if not group.wait(_PLACE_SECONDS):
        free = " and ".join(counted(number, name) for name, number in bundle.items())
        notify(f"waiting for {counted(nodes.most, 'node')} of the Ray cluster on which {free} are free")
    # Ray starts an actor again that is lost with its node, and gives it the same call.
    actor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=processes, num_gpus=gpus)(RayLauncher)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=each) for each in range(nodes.most)]
    actors = [actor.options(scheduling_strategy=place).remote() for place in places]
    ray.get([each.__ray_ready__.remote() for each in actors])
    export({SECRET: setting(SECRET) or secrets.token_hex(16)})
    # Ray has set the number of threads to that of the actor's CPUs, which its ranks divide.
    sent = {"OMP_NUM_THREADS": "", **env, SECRET: setting(SECRET)}
    host = ray.util.get_node_ip_address()
    with listen(host, 0) as free_port:
        endpoint = f"{host}:{free_port.getsockname()[1]}"
    least = 1 + (nodes.least if nodes.least < nodes.most else 1)  # This process is one of them.
    nodes = replace(nodes, endpoint=endpoint, last_call_seconds=_IMPORT_SECONDS, least=least, most=1 + nodes.most)
    theirs = Nodes(endpoint=endpoint, silence_seconds=nodes.silence_seconds)

    def ask(each: Any) -> Any:
        return each.run.remote((argv, processes, theirs, READ, imported), os.getcwd(), sent, notify)

    def stopped() -> bool:
        """Pass signals on, and look after the actors; returns True if a signal has come and the ranks of all nodes have ended."""
        requests.pass_on(lambda _: leader.send({"stop": REST_SECONDS}), lambda: leader.send({"stop": 0}))
        leader.ending = requests.passed_on > 0
        sys.stdout.flush()  # What ranks say; Ray prints it in a thread, into a buffer where no terminal is.
        for ended in ray.wait([*asked], num_returns=len(asked), timeout=0)[0]:
            try:
                notify(f"the launcher of a node has ended, and starts again: {ray.get(ended)}")
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # Such as a working directory that is not there.
            each = asked.pop(ended)
            asked[ask(each)] = each
        return bool(requests.first) and not leader.running

    with noted_signals() as requests:
        leader = Leader(nodes, 0, notify, stopped, address_of=lambda left: (left[0].address, random.choice(PORTS)))
        asked = {ask(each): each for each in actors}
        result = run_starts((), leader, requests)
        ray.wait([*asked], num_returns=len(asked), timeout=_END_SECONDS)
        return result
