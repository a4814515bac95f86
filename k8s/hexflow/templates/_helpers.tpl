{{- define "hexflow.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "hexflow.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "hexflow.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "hexflow.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "hexflow.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* REPOSITORY:TAG, with @DIGEST where there is one. Takes (dict "image" image "version" version). */}}
{{- define "hexflow.imageOf" -}}
{{- printf "%s:%s" .image.repository (default .version .image.tag) -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "hexflow.image" -}}
{{- include "hexflow.imageOf" (dict "image" .Values.image "version" .Chart.AppVersion) -}}
{{- end -}}

{{/* Settings that all services of the mesh share, as a list of environment variables. */}}
{{- define "hexflow.env" -}}
- {name: HEXFLOW_KAFKA__BOOTSTRAP_SERVERS, value: {{ .Values.kafka.bootstrapServers | quote }}}
- {name: HEXFLOW_KAFKA__SECURITY_PROTOCOL, value: {{ .Values.kafka.securityProtocol | quote }}}
- {name: HEXFLOW_KAFKA__REPLICATION_FACTOR, value: {{ .Values.kafka.replicationFactor | quote }}}
- {name: HEXFLOW_KAFKA__SESSION_TIMEOUT_S, value: {{ .Values.kafka.sessionTimeoutSeconds | quote }}}
{{- if hasPrefix "SASL_" .Values.kafka.securityProtocol }}
{{- $secret := required "kafka.credentials.secretName: a Secret with the SASL user and password is needed with SASL" .Values.kafka.credentials.secretName }}
- {name: HEXFLOW_KAFKA__SASL_MECHANISM, value: {{ .Values.kafka.saslMechanism | quote }}}
- name: HEXFLOW_KAFKA__SASL_USERNAME
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ .Values.kafka.credentials.usernameKey }}}}
- name: HEXFLOW_KAFKA__SASL_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: {{ .Values.kafka.credentials.passwordKey }}}}
{{- end }}
{{- with .Values.kafka.tls }}
{{- if .secretName }}
- {name: HEXFLOW_KAFKA__SSL_CAFILE, value: {{ printf "/etc/hexflow/kafka/%s" .caKey | quote }}}
{{- if .certKey }}
- {name: HEXFLOW_KAFKA__SSL_CERTFILE, value: {{ printf "/etc/hexflow/kafka/%s" .certKey | quote }}}
- {name: HEXFLOW_KAFKA__SSL_KEYFILE, value: {{ printf "/etc/hexflow/kafka/%s" .keyKey | quote }}}
{{- end }}
{{- end }}
{{- end }}
- {name: HEXFLOW_REDIS__URL, value: {{ .Values.redis.url | quote }}}
{{- with .Values.redis.credentials }}
{{- if .secretName }}
{{- if .usernameKey }}
- name: HEXFLOW_REDIS__USERNAME
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .usernameKey }}}}
{{- end }}
- name: HEXFLOW_REDIS__PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .secretName }}, key: {{ .passwordKey }}}}
{{- end }}
{{- end }}
{{- with .Values.redis.tls }}
{{- if .secretName }}
- {name: HEXFLOW_REDIS__SSL_CAFILE, value: {{ printf "/etc/hexflow/redis/%s" .caKey | quote }}}
{{- if .certKey }}
- {name: HEXFLOW_REDIS__SSL_CERTFILE, value: {{ printf "/etc/hexflow/redis/%s" .certKey | quote }}}
- {name: HEXFLOW_REDIS__SSL_KEYFILE, value: {{ printf "/etc/hexflow/redis/%s" .keyKey | quote }}}
{{- end }}
{{- end }}
{{- end }}
- {name: HEXFLOW_TOPICS__PREFIX, value: {{ .Values.topics.prefix | quote }}}
- {name: HEXFLOW_TOPICS__REQUEST_PARTITIONS, value: {{ .Values.topics.requestPartitions | int64 | quote }}}
- {name: HEXFLOW_TOPICS__RESULT_PARTITIONS, value: {{ .Values.topics.resultPartitions | int64 | quote }}}
- {name: HEXFLOW_TOPICS__STATE_PARTITIONS, value: {{ .Values.topics.statePartitions | int64 | quote }}}
- {name: HEXFLOW_TOPICS__RETENTION_S, value: {{ .Values.topics.retentionSeconds | int64 | quote }}}
- {name: HEXFLOW_TOPICS__MAX_MESSAGE_BYTES, value: {{ .Values.topics.maxMessageBytes | int64 | quote }}}
- {name: HEXFLOW_LOG__LEVEL, value: {{ .Values.log.level | quote }}}
- {name: HEXFLOW_LOG__FORMAT, value: {{ .Values.log.format | quote }}}
- {name: HEXFLOW_TRACES__ENDPOINT, value: {{ .Values.traces.endpoint | quote }}}
- {name: HEXFLOW_TRACES__SAMPLE_SHARE, value: {{ .Values.traces.sampleShare | quote }}}
- {name: HEXFLOW_TIME_SCALE, value: {{ .Values.timeScale | quote }}}
- {name: HEXFLOW_DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
- {name: HEXFLOW_PROBES__HOST, value: "0.0.0.0"}
- {name: HEXFLOW_PROBES__PORT, value: "8080"}
{{- end -}}

{{/* A service's own settings. Takes a map of names to values. */}}
{{- define "hexflow.ownEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end -}}

{{/* Probes mean progress: /live fails when a loop of the service stands still. */}}
{{- define "hexflow.probes" -}}
startupProbe:
  httpGet: {path: /ready, port: probes}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ max 15 (div (int .startupSeconds) 2) }}
readinessProbe:
  httpGet: {path: /ready, port: probes}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: probes}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "hexflow.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* What every pod has: identity, security, time to drain. Strictly above the drain's bound. */}}
{{- define "hexflow.podSpec" -}}
serviceAccountName: {{ include "hexflow.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (int .Values.drainSeconds) 15 }}
securityContext:
{{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- if .Values.image.pullSecrets }}
imagePullSecrets:
{{- range .Values.image.pullSecrets }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "hexflow.placement" -}}
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
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "hexflow.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.kafka.tls.secretName }}
- {name: kafka-tls, mountPath: /etc/hexflow/kafka, readOnly: true}
{{- end }}
{{- if .Values.redis.tls.secretName }}
- {name: redis-tls, mountPath: /etc/hexflow/redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "hexflow.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .Values.tmpSize }}}
{{- with .Values.kafka.tls.secretName }}
- name: kafka-tls
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- with .Values.redis.tls.secretName }}
- name: redis-tls
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- end -}}

{{/* A pool with the defaults filled in. Takes (dict "root" $ "pool" pool). */}}
{{- define "hexflow.pool" -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy .pool)) -}}
{{- end -}}

{{- define "hexflow.poolName" -}}
{{- printf "%s-worker-%s" (include "hexflow.fullname" .root) .pool.name -}}
{{- end -}}
