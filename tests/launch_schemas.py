"""Owns strict schemas of the Kubernetes objects in docs/launch: fields not here are errors.

Written after the references of Kubernetes 1.34 (batch/v1, v1) and of Kubeflow's Training Operator
1.9 (kubeflow.org/v1); of each object only the fields that the recipes use, with their types.
"""

from typing import Any

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"}


def fields(required: str = "", **properties: Schema) -> Schema:
    """An object of exactly these fields; `required` names those that must be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def some(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA = fields("name", name=NAME, labels=LABELS)
RESOURCES: Schema = {
    "type": "object",
    "additionalProperties": QUANTITY,
    "propertyNames": one_of("cpu", "memory"),
}
# A value, or where to take it from: one of the two.
VARIABLE: Schema = {
    **fields(
        "name",
        name={"type": "string", "pattern": "^[A-Z_][A-Z0-9_]*$"},
        value={"type": "string"},  # numbers must be quoted
        valueFrom=fields(
            "fieldRef",
            fieldRef=fields("fieldPath", fieldPath=one_of("status.podIP", "metadata.name")),
        ),
    ),
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
}
SECCOMP = fields("type", type=one_of("RuntimeDefault", "Unconfined"))
CONTAINER = fields(
    "name image command resources",
    name=NAME,
    image=TEXT,
    workingDir=TEXT,
    command=some(TEXT),
    args=some(TEXT),
    env=some(VARIABLE),
    ports=some(fields("containerPort", name=NAME, containerPort=PORT)),
    resources=fields("requests limits", requests=RESOURCES, limits=RESOURCES),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG,
        capabilities=fields(drop=some(TEXT)),
    ),
    volumeMounts=some(fields("name mountPath", name=NAME, mountPath=TEXT)),
)
POD_FIELDS: dict[str, Schema] = {
    "subdomain": NAME,
    "securityContext": fields(
        runAsNonRoot=FLAG, runAsUser=COUNT, fsGroup=COUNT, seccompProfile=SECCOMP
    ),
    "containers": some(CONTAINER),
    "volumes": some(
        fields(
            "name persistentVolumeClaim",
            name=NAME,
            persistentVolumeClaim=fields("claimName", claimName=NAME),
        )
    ),
}
SERVICE = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("v1"),
    kind=one_of("Service"),
    metadata=METADATA,
    spec=fields(
        "selector",
        clusterIP=one_of("None"),  # the text, as YAML reads it
        publishNotReadyAddresses=FLAG,
        selector=LABELS,
    ),
)
JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("batch/v1"),
    kind=one_of("Job"),
    metadata=METADATA,
    spec=fields(
        "template",
        completionMode=one_of("Indexed", "NonIndexed"),
        completions=COUNT,
        parallelism=COUNT,
        backoffLimit=COUNT,
        podReplacementPolicy=one_of("Failed", "TerminatingOrFailed"),
        template=fields(
            "spec",
            # A Job's pods must not have "Always".
            spec=fields(
                "restartPolicy containers",
                restartPolicy=one_of("OnFailure", "Never"),
                **POD_FIELDS,
            ),
        ),
    ),
)
PYTORCH_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion=one_of("kubeflow.org/v1"),
    kind=one_of("PyTorchJob"),
    metadata=METADATA,
    spec=fields(
        "pytorchReplicaSpecs",
        runPolicy=fields(
            cleanPodPolicy=one_of("All", "Running", "None"),
            backoffLimit=COUNT,
        ),
        nprocPerNode=TEXT,
        elasticPolicy=fields(
            rdzvBackend=one_of("c10d", "etcd", "etcd-v2"),
            rdzvId=TEXT,
            rdzvHost=TEXT,
            rdzvPort=PORT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            maxRestarts=COUNT,
        ),
        pytorchReplicaSpecs=fields(
            **{
                kind: fields(
                    "template",
                    replicas=COUNT,
                    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
                    # The operator overrides the pods' own restartPolicy.
                    template=fields("spec", spec=fields("containers", **POD_FIELDS)),
                )
                for kind in ("Master", "Worker")
            }
        ),
    ),
)
KINDS = {"Service": SERVICE, "Job": JOB, "PyTorchJob": PYTORCH_JOB}
