/* The search of Material for MkDocs runs in a Worker. Browsers allow none on a page that is opened
   as a file, so this class runs the worker's script in a hidden frame of the page instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();  // Firefox would replace the document of a new frame later
      inside.close();
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      script.src = url;
      inside.documentElement.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
