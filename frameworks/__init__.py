"""One folder per framework, installed as polyhvd.<name>; this file itself is never installed."""
