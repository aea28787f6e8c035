"""The HTTP server: traces and OpenTelemetry spans in, states and decisions out. Needs ``kp-scorer[serve]``."""
