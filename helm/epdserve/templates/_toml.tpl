{{/* A table as TOML: dict path (list of names), table. Plain keys first, then tables; whole numbers stay whole. */}}
{{- define "epdserve.toml" -}}
{{- $path := .path }}
{{- range $name, $value := .table }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $name }} = {{ include "epdserve.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $name, $value := .table }}
{{- if kindIs "map" $value }}

[{{ join "." (append $path $name) }}]
{{- include "epdserve.toml" (dict "path" (append $path $name) "table" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "epdserve.tomlValue" -}}
{{- if kindIs "string" . }}{{ toJson . }}
{{- else if kindIs "bool" . }}{{ . }}
{{- else if kindIs "slice" . }}
{{- $items := list }}{{ range . }}{{ $items = append $items (include "epdserve.tomlValue" .) }}{{ end }}[{{ join ", " $items }}]
{{- else if kindIs "map" . }}
{{- $items := list }}
{{- range $name, $value := . }}{{ $items = append $items (printf "%s = %s" $name (include "epdserve.tomlValue" $value)) }}{{ end }}{ {{- join ", " $items -}} }
{{- else if eq (float64 (floor .)) (float64 .) }}{{ int64 . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{/* What the chart fills in; the user's keys win where both say something */}}
{{- define "epdserve.config" -}}
{{- $machine := dict "prefill_workers" (max 1 (int .Values.prefill.replicas)) "decode_workers" (max 1 (int .Values.decode.replicas)) "encode_workers" (int .Values.encode.replicas) "store" .Values.store.enabled }}
{{- $tenancy := dict }}
{{- if .Values.router.adminPort }}{{ $_ := set $tenancy "admin_port" .Values.router.adminPort }}{{ end }}
{{- if not (or (include "epdserve.keysSecret" .) .Values.auth.tenants.existingSecret) }}{{ $_ := set $tenancy "open_without_keys" true }}{{ end }}
{{- $config := dict "machine" $machine "router" (dict "host" "0.0.0.0" "port" 8000 "tenancy" $tenancy) "pool" (dict "start_timeout_s" .Values.workers.startSeconds) }}
{{- if .Values.store.ssd }}
{{- $directories := list }}
{{- range .Values.store.ssd }}
{{- $directories = append $directories (dict "folder" (printf "/ssd/%s/kv" .name) "capacity_bytes" .capacityBytes) }}
{{- end }}
{{- $_ := set $config "store" (dict "ssd" (dict "directories" $directories)) }}
{{- end }}
{{- include "epdserve.toml" (dict "path" (list) "table" (mergeOverwrite $config (deepCopy .Values.config))) }}
{{- end }}
