{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{/* Name of the chart's objects: the release name, with the suffix `-quire` if it does not contain "quire". */}}
{{- define "quire.fullname" -}}
{{- if contains "quire" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-quire" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "quire.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "quire.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{/* Labels that select the operator's pod, also used in the NetworkPolicies of server pods. */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: quire
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Image reference: (list . "operator" defaultTag) */}}
{{- define "quire.image" -}}
{{- $root := index . 0 }}{{ $image := index $root.Values.image (index . 1) }}
{{- $name := $image.repository }}
{{- with $root.Values.image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $image.repository }}{{ end }}
{{- if $image.digest }}{{ printf "%s@%s" $name $image.digest }}
{{- else }}{{ printf "%s:%s" $name ($image.tag | default (index . 2)) }}{{ end }}
{{- end }}
