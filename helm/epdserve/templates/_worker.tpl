{{/* One worker's pod: dict root, role, pool, ray (true: the container runs a Ray node, whose actor the worker is) */}}
{{- define "epdserve.workerMetadata" -}}
labels:
  {{- include "epdserve.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .role }}
annotations:
  checksum/config: {{ include "epdserve.config" .root | sha256sum }}
  {{- with .pool.rdma.networks }}
  k8s.v1.cni.cncf.io/networks: {{ . | quote }}
  {{- end }}
  {{- with .root.Values.workers.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Of every Ray process: it listens beyond loopback, and wants the cluster token of whoever calls */}}
{{- define "epdserve.rayEnv" -}}
- {name: RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, value: "1"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "epdserve.tokenSecret" . | quote }}, key: token}}
{{- end }}

{{- define "epdserve.workerEnv" -}}
- {name: EPDSERVE_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: EPDSERVE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: EPDSERVE_MACHINE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: EPDSERVE_PORT, value: "7400"}
- {name: EPDSERVE_METRICS_PORT, value: "7401"}
- {name: EPDSERVE_PROBE_PORT, value: "7402"}
- {name: EPDSERVE_PID_FILE, value: /run/epdserve/worker.pid}
{{- if .ray }}
{{ include "epdserve.rayEnv" .root }}
{{- end }}
{{- with .pool.rdma.devices }}
- {name: UCX_NET_DEVICES, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := .pool.env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{ include "epdserve.env" .root }}
{{- end }}

{{- define "epdserve.workerPod" -}}
{{- $drain := include "epdserve.drainSeconds" .root | int }}
serviceAccountName: {{ default (include "epdserve.serviceAccount" .root) .root.Values.workers.serviceAccountName | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "epdserve.pullSecrets" .root }}
# What runs is finished or handed over within the pool's drain_timeout_s; 10 s more are the worker's own patience
terminationGracePeriodSeconds: {{ add $drain 30 }}
securityContext:
  {{- include "epdserve.podSecurity" .root | nindent 2 }}
{{- if .pool.topologyKey }}
{{ include "epdserve.spread" (dict "root" .root "key" .pool.topologyKey "component" .role) }}
{{- end }}
{{ include "epdserve.placement" .pool }}
{{- include "epdserve.demoModel" .root | nindent 0 }}
containers:
  - name: {{ ternary "ray-worker" .role .ray }}
    image: {{ include "epdserve.image" (dict "root" .root "image" .root.Values.image.worker) | quote }}
    imagePullPolicy: {{ .root.Values.image.worker.pullPolicy }}
    {{- if not .ray }}
    command: [epdserve, worker, {{ .role }}]
    {{- end }}
    env:
      {{- include "epdserve.workerEnv" . | nindent 6 }}
    ports:
      - {name: rpc, containerPort: 7400}
      - {name: metrics, containerPort: 7401}
      - {name: probes, containerPort: 7402}
    {{- if .ray }}
    startupProbe: # this Ray node is up
      tcpSocket: {port: 6380}
      periodSeconds: 5
      failureThreshold: 60
    livenessProbe:
      tcpSocket: {port: 6380}
      periodSeconds: 10
      failureThreshold: 6
    {{- else }}
    startupProbe: # the model is loaded, and the registry knows the worker
      httpGet: {path: /ready, port: probes}
      periodSeconds: 5
      failureThreshold: {{ div (add .root.Values.workers.startSeconds 4) 5 }}
    livenessProbe: # the event loop turns, and no step hangs
      httpGet: {path: /live, port: probes}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    {{- end }}
    readinessProbe: # takes work: started, not draining
      httpGet: {path: /ready, port: probes}
      periodSeconds: 3
      timeoutSeconds: 5
      failureThreshold: 3
    lifecycle: # drains: routers go elsewhere, what runs ends here or is handed over
      preStop: {exec: {command: [epdserve, stop-worker, "--wait-s={{ add $drain 15 }}"]}}
    resources:
      {{- include "epdserve.resources" (dict "pool" .pool) | nindent 6 }}
    securityContext:
      {{- include "epdserve.containerSecurity" (dict "rdma" .pool.rdma.resource) | nindent 6 }}
    volumeMounts:
      {{- include "epdserve.mounts" .root | nindent 6 }}
      - {name: shared-memory, mountPath: /dev/shm}
      {{- if .pool.hugepages }}
      - {name: hugepages, mountPath: /hugepages}
      {{- end }}
      {{- if eq .role "store" }}
      {{- range .root.Values.store.ssd }}
      - {name: ssd-{{ .name }}, mountPath: /ssd/{{ .name }}}
      {{- end }}
      {{- end }}
volumes:
  {{- include "epdserve.volumes" .root | nindent 2 }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ .pool.sharedMemory | quote }}}
  {{- if .pool.hugepages }}
  - {name: hugepages, emptyDir: {medium: HugePages-2Mi}}
  {{- end }}
  {{- if eq .role "store" }}
  {{- range .root.Values.store.ssd }}
  {{- if .hostPath }}
  - name: ssd-{{ .name }}
    hostPath: {path: {{ .hostPath | quote }}, type: DirectoryOrCreate}
  {{- end }}
  {{- end }}
  {{- end }}
{{- end }}
