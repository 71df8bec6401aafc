"""HTTP: OpenAI's routes, adapters, metrics and health. Needs the extra `lorajax[http]`."""
