{{/* SPDX-License-Identifier: Apache-2.0
What the operator may do in a namespace that it looks after. Verbs and resources by name; a test compares them with what
the operator really asks of an API server, in both directions. Not here on purpose: pods/exec, pods/log, anything on
roles, and any write to an LLMService but its status. */}}
{{- define "quire.rules" -}}
- apiGroups: [quire.dev]
  resources: [llmservices]
  verbs: [list, watch]
- apiGroups: [quire.dev]
  resources: [llmservices/status]
  verbs: [patch]
# Not a finalizer of ours, there is none: where OwnerReferencesPermissionEnforcement is on (OpenShift), owner references
# that block deletion need it.
- apiGroups: [quire.dev]
  resources: [llmservices/finalizers]
  verbs: [update]
# What an LLMService becomes. `create` and `patch` are both needed for server-side apply, `get` for what is there under a
# name already, `delete` for what is not wanted any more and for what a deleted LLMService of the same name left.
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
# Kinds that only some clusters have; a rule for one that is absent grants nothing.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
# Secrets: it makes two for each LLMService (the key of the pods' admin port, and copies of the keys that sources name),
# and reads those that sources name, which only the LLMServices know: so `get`, by name. Not list and watch, which would
# show it all Secrets of a namespace.
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
{{- end }}
