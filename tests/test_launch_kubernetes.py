"""Owns the checks of the Kubernetes recipes in docs/launch, without a cluster to run them.

Strict schemas first; then the containers' commands, in the environment that a cluster would make of
the recipe, with a stand-in for torchrun whose arguments go through torchrun's own parser.
"""

import copy
import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousParameters

from launch_commands import (
    NUM_HOSTS,
    RANKS_PER_HOST,
    RECIPES,
    SHOW,
    check_environment,
    check_example,
    parse_torchrun,
    run_with,
    stand_in,
)
from launch_schemas import KINDS

Manifest = dict[str, Any]


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML libraries quietly take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key comes twice in {keys}"
        return super().construct_mapping(node, deep=deep)


def load(name: str) -> dict[str, Manifest]:
    """The objects in a file by kind, each as its schema wants it."""
    found = {}
    for manifest in yaml.load_all((RECIPES / name).read_text(), StrictLoader):
        validate(manifest)
        found[manifest["kind"]] = manifest
    return found


def validate(manifest: Manifest) -> None:
    jsonschema.Draft202012Validator(KINDS[manifest["kind"]]).validate(manifest)


def check_pod(pod: Manifest) -> Manifest:
    """What both recipes promise about their pods; returns the container."""
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"]["cpu"] == str(RANKS_PER_HOST)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    check_environment(
        {variable["name"]: variable.get("value", "-") for variable in container["env"]}
    )
    return container


def expand(text: str, environment: dict[str, str]) -> str:
    """As the kubelet does in command and args: $(NAME), and $$; what it does not know it leaves."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda m: "$" if m[1] == "$" else environment.get(m[2], m[0]),
        text,
    )


def torchrun_arguments(container: Manifest, folder: Path, **cluster: str) -> list[str]:
    """What torchrun would get in the pod, which runs the command in an environment of its own."""
    environment = {v["name"]: v["value"] for v in container["env"] if "value" in v} | cluster
    command = [expand(word, environment) for word in [*container["command"], *container["args"]]]
    stand_in(folder, "torchrun", SHOW)
    arguments: list[str] = json.loads(run_with(folder, command, **environment))[0]
    return arguments


def test_job(tmp_path: Path) -> None:
    objects = load("kubernetes-job.yaml")
    service, job = objects["Service"], objects["Job"]
    name = job["metadata"]["name"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == NUM_HOSTS
    container = check_pod(pod)
    hosts = []
    for index in range(NUM_HOSTS):
        arguments = torchrun_arguments(
            container, tmp_path, JOB_COMPLETION_INDEX=str(index), POD_IP=f"10.1.0.{index}"
        )
        options = parse_torchrun(arguments)
        assert options.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29400"
        assert options.local_addr == f"10.1.0.{index}"
        rendezvous = RendezvousParameters(
            "c10d", options.rdzv_endpoint, "id", NUM_HOSTS, NUM_HOSTS, **options.rdzv_configs
        )
        hosts.append(rendezvous.get_as_bool("is_host"))
        check_example(options.training_script_args, NUM_HOSTS * RANKS_PER_HOST)
    assert hosts == [True, False]


def test_pytorch_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("kubernetes-pytorchjob.yaml")["PyTorchJob"]
    name, policy = job["metadata"]["name"], job["spec"]["elasticPolicy"]
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"] == NUM_HOSTS
    container = check_pod(worker["template"]["spec"])
    assert container["name"] == "pytorch"
    # What the operator makes of elasticPolicy, and torchrun reads beside its arguments.
    for variable, value in {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:23456",
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }.items():
        monkeypatch.setenv(variable, value)
    options = parse_torchrun(torchrun_arguments(container, tmp_path))
    assert options.rdzv_endpoint == "pydist-train-worker-0:23456"
    check_example(options.training_script_args, NUM_HOSTS * RANKS_PER_HOST)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.completionmode", "Indexed"),
        ("spec.completions", "2"),
        ("spec.template.spec.restartPolicy", "Always"),
        ("spec.template.spec.containers.0.env.1.value", 1),
        ("spec.template.spec.containers.0.env.0.value", "beside valueFrom"),
        ("spec.template.spec.containers.0.resources.limits.memory", "16 GB"),
        ("spec.template.spec.containers.0.resources.limits.cpus", "8"),
        ("metadata.name", "pydist_train"),
        ("apiVersion", "batch/v2"),
    ],
)
def test_wrong_fields_are_seen(path: str, value: object) -> None:
    wrong = copy.deepcopy(load("kubernetes-job.yaml")["Job"])
    place: Any = wrong
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong)


def test_keys_that_come_twice_are_seen() -> None:
    with pytest.raises(AssertionError, match="comes twice"):
        yaml.load("a: 1\na: 2\n", StrictLoader)
