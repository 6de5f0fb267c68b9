# The image of worker, beat, Flower and the commands. Handlers of your own: build on it, install
# them, and name their modules in CLAIMCHECK_HANDLERS.
FROM python:3.13-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 CLAIMCHECK_REQUIRE_SERVICES=1

RUN useradd --create-home --uid 10001 claimcheck
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY db db
COPY dispatch dispatch
COPY tasks tasks
COPY alembic alembic
RUN pip install --editable '.[mysql,parquet]'

USER claimcheck
STOPSIGNAL SIGTERM
ENTRYPOINT ["celery", "-A", "tasks"]
CMD ["worker", "--loglevel=INFO"]
