"""`unidist kubernetes`: manifests, and discovery of pods."""

from __future__ import annotations

import click
import yaml

from unidist.errors import ConfigurationError
from unidist_kubernetes import discovery as kubernetes_discovery
from unidist_kubernetes.kinds import objects
from unidist_kubernetes.manifest import JobKind, Manifest
from unidist_launch.options.numbers import Whole

_HELP = {"help_option_names": ["-h", "--help"]}
_COUNT = Whole(min=1)


class _Plain(yaml.SafeDumper):
    """Writes out what stands in several places, where YAML would refer to the first."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@click.group(context_settings=_HELP)
def kubernetes() -> None:
    """Write manifests for Kubernetes, and find the pods that run."""


@kubernetes.command(context_settings={**_HELP, "allow_interspersed_args": False})
@click.option(
    "--kind",
    type=click.Choice([each.value for each in JobKind]),
    default="job",
    show_default=True,
    help="What to write.",
)
@click.option("--name", required=True, metavar="NAME", help="Name of the job.")
@click.option("--image", required=True, metavar="IMAGE", help="Image with Python, unidist and the script.")
@click.option("--nodes", "num_pods", type=_COUNT, default=1, show_default=True, metavar="N", help="Number of pods.")
@click.option("--slots-per-node", "slots", type=_COUNT, required=True, metavar="N", help="Ranks of each pod.")
@click.option("--namespace", default="", metavar="NAME", help="Namespace (default: kubectl's).")
@click.option("--gpus", type=Whole(min=0), default=0, metavar="N", help="GPUs of each pod (nvidia.com/gpu).")
@click.option("--cpus", default="", metavar="QUANTITY", help="Cores of each pod: 8, 500m.")
@click.option("--memory", default="", metavar="QUANTITY", help="Memory of each pod: 64Gi.")
@click.option("--shm-size", "shared_memory", default="", metavar="QUANTITY", help="Size of /dev/shm: 8Gi.")
@click.option("--secret", default="", metavar="NAME", help="Secret with the job's secret (default: NAME-unidist).")
@click.option("--port", type=Whole(1024, 65535), metavar="N", help="Of the first pod (default: 29400).")
@click.option("--workdir", "folder", default="", metavar="DIR", help="Where the script runs (default: the image's).")
@click.option("--python", default="python", show_default=True, metavar="FILE", help="Python of the image.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", help="Variable of the pods. Repeatable.")
@click.option("--max-restarts", type=Whole(min=0), default=0, metavar="N", help="Of the job as a whole.")
@click.option("--queue", default="", metavar="NAME", help="Queue of Volcano (default: its own).")
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED)
def manifest(
    *,
    kind: str,
    name: str,
    image: str,
    num_pods: int,
    slots: int,
    namespace: str,
    gpus: int,
    cpus: str,
    memory: str,
    shared_memory: str,
    secret: str,
    port: int | None,
    folder: str,
    python: str,
    env: tuple[str, ...],
    max_restarts: int,
    queue: str,
    arguments: tuple[str, ...],
) -> None:
    """Print a manifest that runs `unidist launch ARGUMENTS` in pods.

    \b
      unidist kubernetes manifest --name train --image me/train --nodes 2 --slots-per-node 4 train.py > job.yaml
      kubectl apply -f job.yaml

    Options of `unidist launch` stand after two dashes; with --min-np, a JobSet's pods come and go. All kinds but an
    MPIJob need a Secret; the first lines of what is printed say how to make it.
    """
    from unidist_launch.commands.arguments import check_launch

    check_launch(arguments, scheduler="Kubernetes")
    variables = {}
    for item in env:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigurationError(f"--env {item!r}: write KEY=VALUE.")
        variables[key] = value
    made = Manifest(
        kind=JobKind(kind),
        name=name,
        image=image,
        num_pods=num_pods,
        slots=slots,
        arguments=arguments,
        namespace=namespace,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        shared_memory=shared_memory,
        secret=secret,
        port=port,
        folder=folder,
        python=python,
        env=variables,
        max_restarts=max_restarts,
        queue=queue,
    )
    click.echo("# Written by `unidist kubernetes manifest`.")
    if made.kind is not JobKind.MPIJOB:
        where = f" --namespace {namespace}" if namespace else ""
        click.echo("# The Secret, once:")
        click.echo("#   head -c 32 /dev/urandom | base64 > secret")
        click.echo(f"#   kubectl create secret generic {made.secret_name} --from-file=secret{where}; rm secret")
    click.echo(yaml.dump_all(objects(made), Dumper=_Plain, sort_keys=False), nl=False)


@kubernetes.command(context_settings=_HELP)
@click.option("-l", "--selector", required=True, metavar="LABELS", help="Labels of the pods: job-name=train.")
@click.option("--namespace", default="", metavar="NAME", help="Namespace (default: kubectl's).")
@click.option("--slots", type=_COUNT, metavar="N", help="Ranks of each pod (default: its GPUs, or 1).")
@click.option("--by-name", is_flag=True, help="Print names of the cluster's DNS instead of addresses.")
@click.option("--kubectl", default="kubectl", show_default=True, metavar="FILE", help="The program to ask.")
def discover(selector: str, namespace: str, slots: int | None, by_name: bool, kubectl: str) -> None:
    """Print HOST:SLOTS for every pod that is ready: a script for --host-discovery-script.

    \b
      unidist kubernetes discover -l job-name=train
    """
    found = kubernetes_discovery.ask(kubectl, selector, namespace)
    for line in kubernetes_discovery.lines(found, slots=slots, by_name=by_name):
        click.echo(line)
