{{- /* The configuration file of each plane: the values under `config`, and the addresses, which only the chart knows. */ -}}

{{- define "dihedral.controlPlaneConfig" -}}
{{- $config := deepCopy (pick .Values.config "server" "admission" "scheduler" "workers" "log" "metrics") -}}
{{- $name := include "dihedral.fullname" . -}}
{{- $worker := printf "%s-worker-0.%s-worker.%s.svc" $name $name .Release.Namespace -}}
{{- $_ := set $config.server "host" "0.0.0.0" -}}
{{- $_ := set $config.metrics "host" "0.0.0.0" -}}
{{- $_ := set $config.workers "address" (printf "%s:%d" $worker (int .Values.config.worker.port)) -}}
{{ toYaml $config }}
{{- end -}}

{{- define "dihedral.workerConfig" -}}
{{- $config := deepCopy (pick .Values.config "worker" "log" "metrics") -}}
{{- $_ := set $config.worker "host" "0.0.0.0" -}}
{{- $_ := set $config.metrics "host" "0.0.0.0" -}}
{{ toYaml $config }}
{{- end -}}
