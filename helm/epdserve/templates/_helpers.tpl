{{- define "epdserve.name" -}}{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "epdserve.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "epdserve.name" .) .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name (include "epdserve.name" .) | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "epdserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "epdserve.selector" . }}
{{- end }}

{{- define "epdserve.selector" -}}
app.kubernetes.io/name: {{ include "epdserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "epdserve.image" -}}
{{- $image := .image }}{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end }}

{{- define "epdserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "epdserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "epdserve.tokenSecret" -}}
{{ default (printf "%s-token" (include "epdserve.fullname" .)) .Values.auth.clusterToken.existingSecret }}
{{- end }}

{{- define "epdserve.keysSecret" -}}
{{- if .Values.auth.apiKeys.existingSecret }}{{ .Values.auth.apiKeys.existingSecret }}
{{- else if .Values.auth.apiKeys.value }}{{ include "epdserve.fullname" . }}-keys{{ end }}
{{- end }}

{{/* Seconds that a worker may take to drain, as the pool's settings say */}}
{{- define "epdserve.drainSeconds" -}}
{{- $pool := default (dict) .Values.config.pool }}{{ ceil (default 30.0 $pool.drain_timeout_s) | int }}
{{- end }}
{{- define "epdserve.routerDrainSeconds" -}}
{{- $router := default (dict) .Values.config.router }}{{ ceil (default 30.0 $router.drain_timeout_s) | int }}
{{- end }}

{{- define "epdserve.scheme" -}}{{ ternary "https" "http" (ne .Values.router.tls.existingSecret "") }}{{- end }}

{{- define "epdserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.securityContext.runAsUser }}
runAsGroup: {{ .Values.securityContext.runAsGroup }}
fsGroup: {{ .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* dict rdma */}}
{{- define "epdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  add: [IPC_LOCK]  # RDMA pins memory
  {{- end }}
{{- end }}

{{- define "epdserve.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What every process of an installation is told alike */}}
{{- define "epdserve.env" -}}
- {name: EPDSERVE_CONFIG, value: /etc/epdserve/epdserve.toml}
- {name: EPDSERVE_MODEL, value: {{ printf "%s/%s" .Values.model.mountPath .Values.model.folder | quote }}}
- {name: EPDSERVE_TOKEN_FILE, value: /etc/epdserve-token/token}
{{- $external := .Values.registry.external }}
{{- if eq .Values.registry.kind "valkey" }}
- name: REGISTRY_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "epdserve.fullname" . }}-registry, key: password}}
- {name: EPDSERVE_REGISTRY, value: "redis://:$(REGISTRY_PASSWORD)@{{ include "epdserve.fullname" . }}-registry:6379/0"}
{{- else if $external.existingSecret }}
- name: EPDSERVE_REGISTRY
  valueFrom: {secretKeyRef: {name: {{ $external.existingSecret | quote }}, key: url}}
{{- else }}
- {name: EPDSERVE_REGISTRY, value: {{ required "registry.external needs url or existingSecret" $external.url | quote }}}
{{- end }}
- {name: HOME, value: /tmp}
- {name: PYTHONSAFEPATH, value: "1"}
- {name: OMP_WAIT_POLICY, value: PASSIVE}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- end }}

{{- define "epdserve.mounts" -}}
- {name: config, mountPath: /etc/epdserve, readOnly: true}
- {name: token, mountPath: /etc/epdserve-token, readOnly: true}
- {name: model, mountPath: {{ .Values.model.mountPath | quote }}, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: run, mountPath: /run/epdserve}
{{- if .Values.registry.external.caSecret }}
- {name: registry-ca, mountPath: /etc/epdserve-registry-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "epdserve.volumes" -}}
- name: config
  configMap: {name: {{ include "epdserve.fullname" . }}-config}
- name: token
  secret: {secretName: {{ include "epdserve.tokenSecret" . | quote }}, defaultMode: 0440}
- name: model
  {{- if .Values.model.demo }}
  emptyDir: {}
  {{- else }}
  {{- if not .Values.model.volume }}{{ fail "model.volume names where the checkpoint is; or set model.demo" }}{{ end }}
  {{- toYaml .Values.model.volume | nindent 2 }}
  {{- end }}
- {name: tmp, emptyDir: {}}
- {name: run, emptyDir: {}}
{{- if .Values.registry.external.caSecret }}
- name: registry-ca
  secret: {secretName: {{ .Values.registry.external.caSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "epdserve.demoModel" -}}
{{- if .Values.model.demo }}
initContainers:
  - name: demo-model
    image: {{ include "epdserve.image" (dict "root" . "image" .Values.image.worker) | quote }}
    imagePullPolicy: {{ .Values.image.worker.pullPolicy }}
    command: [epdserve, demo-model, {{ printf "%s/%s" .Values.model.mountPath .Values.model.folder | quote }}]
    env: [{name: HOME, value: /tmp}, {name: PYTHONSAFEPATH, value: "1"}]
    resources: {requests: {cpu: 100m, memory: 512Mi}, limits: {memory: 1Gi}}
    securityContext:
      {{- include "epdserve.containerSecurity" (dict "rdma" false) | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: {{ .Values.model.mountPath | quote }}}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* dict root, pool, name: requests and limits with GPUs, hugepages and RDMA devices in both, as Kubernetes wants them */}}
{{- define "epdserve.resources" -}}
{{- $both := dict }}
{{- with .pool.gpus }}{{ $_ := set $both (default "nvidia.com/gpu" $.pool.gpuResource) (int .) }}{{ end }}
{{- with .pool.hugepages }}{{ $_ := set $both "hugepages-2Mi" . }}{{ end }}
{{- with .pool.rdma.resource }}{{ $_ := set $both . (int $.pool.rdma.count) }}{{ end }}
requests:
  {{- merge (deepCopy $both) (default (dict) .pool.resources.requests) | toYaml | nindent 2 }}
limits:
  {{- merge (deepCopy $both) (default (dict) .pool.resources.limits) | toYaml | nindent 2 }}
{{- end }}

{{- define "epdserve.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .key | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "epdserve.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "epdserve.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
