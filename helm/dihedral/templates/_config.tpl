{{- /* The configuration file of each plane: the values under `config`, and what only the chart knows: addresses, and a name that outlives pods. */ -}}

{{- define "dihedral.controlPlaneConfig" -}}
{{- $config := deepCopy (pick .Values.config "server" "admission" "scheduler" "workers" "plugins" "log" "metrics") -}}
{{- $name := include "dihedral.fullname" . -}}
{{- $workers := printf "%s-worker.%s.svc" $name .Release.Namespace -}}
{{- $_ := set $config.server "host" "0.0.0.0" -}}
{{- $_ := set $config.metrics "host" "0.0.0.0" -}}
{{- $_ := set $config.workers "address" (printf "dns:%s:%d" $workers (int .Values.config.worker.port)) -}}
{{- if not $config.workers.owner_id -}}
{{- $_ := set $config.workers "owner_id" $name -}}
{{- end -}}
{{ toYaml $config }}
{{- end -}}

{{- define "dihedral.workerConfig" -}}
{{- $config := deepCopy (pick .Values.config "worker" "plugins" "log" "metrics") -}}
{{- $_ := set $config.worker "host" "0.0.0.0" -}}
{{- $_ := set $config.metrics "host" "0.0.0.0" -}}
{{ toYaml $config }}
{{- end -}}
