#!/usr/bin/env python3
"""Writes prometheusrule.yaml from the rule files of deploy/prometheus: the same text, four blanks to the right.

    deploy/kubernetes/make_prometheusrule.py            writes it
    deploy/kubernetes/make_prometheusrule.py --check    exits 1 if it is another
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
RULES = [HERE.parent / "prometheus" / name for name in ("recording.rules.yml", "alerts.rules.yml")]
HEAD = """# Made by make_prometheusrule.py from deploy/prometheus; for the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: weightbroker
  namespace: weightbroker
  labels:
    app.kubernetes.io/name: weightbroker
spec:
  groups:
"""


def groups(path):
    lines = path.read_text().splitlines()
    return [f"  {line}".rstrip() for line in lines[lines.index("groups:") + 1:]]


def main():
    text = HEAD + "\n".join(line for path in RULES for line in groups(path)) + "\n"
    target = HERE / "prometheusrule.yaml"
    if "--check" not in sys.argv[1:]:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        sys.exit("deploy/kubernetes/prometheusrule.yaml is not what the rules say: run make_prometheusrule.py")


if __name__ == "__main__":
    main()
