"""KnowledgePulse scorer: Celery workers that score AI-agent reasoning traces and route the decisions."""
