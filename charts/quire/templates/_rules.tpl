{{/* SPDX-License-Identifier: Apache-2.0
Permissions of the operator in a namespace that it watches. A test compares verbs and resources with the operator's
requests to an API server, in both directions. Deliberately not granted: pods/exec, pods/log, any access to roles, and
any write to an LLMService except its status. */}}
{{- define "quire.rules" -}}
- apiGroups: [quire.dev]
  resources: [llmservices]
  verbs: [list, watch]
- apiGroups: [quire.dev]
  resources: [llmservices/status]
  verbs: [patch]
# The operator uses no finalizers. The permission is required for owner references with blockOwnerDeletion if the
# admission plugin OwnerReferencesPermissionEnforcement is enabled (OpenShift).
- apiGroups: [quire.dev]
  resources: [llmservices/finalizers]
  verbs: [update]
# Objects of an LLMService. Server-side apply requires `create` and `patch`. `get` reads an existing object with the same
# name. `delete` removes objects that the spec no longer requires, and leftovers of a deleted LLMService.
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
# Optional kinds. A rule for a kind that the cluster does not have grants nothing.
- apiGroups: [disaggregatedset.x-k8s.io]
  resources: [disaggregatedsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
# Secrets. The operator creates two for each LLMService (the key of the pods' admin port, and copies of the Secrets that
# sources reference), and reads the referenced Secrets by name with `get`. `list` and `watch` are not granted, because
# they give access to all Secrets in a namespace.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, list]
# The reason why Kueue keeps a pod waiting.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
{{- end }}
