"""The HTTP door: traces and OpenTelemetry spans in, states and decisions out. Needs ``kp-scorer[serve]``."""
