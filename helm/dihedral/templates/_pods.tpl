{{- /* What the pods of both planes share. */ -}}

{{- define "dihedral.podAnnotations" -}}
checksum/config: {{ .config | sha256sum }}
{{- if .metrics.enabled }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ int .metrics.port | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- with .extra }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dihedral.env" -}}
- name: DIHEDRAL_CONFIG
  value: /etc/dihedral/dihedral.yaml
- name: PYTHONSAFEPATH
  value: "1"
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dihedral.ports" -}}
- name: grpc
  containerPort: {{ int .grpc }}
{{- if .metrics.enabled }}
- name: metrics
  containerPort: {{ int .metrics.port }}
{{- end }}
{{- end -}}

{{- define "dihedral.servicePorts" -}}
- name: grpc
  port: {{ int .grpc }}
  targetPort: grpc
  appProtocol: kubernetes.io/h2c
{{- if .metrics.enabled }}
- name: metrics
  port: {{ int .metrics.port }}
  targetPort: metrics
{{- end }}
{{- end -}}

{{- /* The kubelet asks grpc.health.v1 for one service: `liveness` (the event loop turns) or `readiness` (it can serve). */ -}}
{{- define "dihedral.probe" -}}
grpc:
  port: {{ int .port }}
  service: {{ .service }}
timeoutSeconds: 5
{{- end -}}

{{- define "dihedral.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}
