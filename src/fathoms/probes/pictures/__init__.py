"""Pictures of what a probe measures, each as SVG, PNG and the data as JSON."""
