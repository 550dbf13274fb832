// Search from disk: browsers start no worker for a page of file://. This one runs the worker's script in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(inner, one)));
      this.load(inner, url).then(() => {
        this.inner = inner;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    load(inner, url) {
      return new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        script.src = new URL(url, location);
        script.onload = done;
        script.onerror = failed;
        inner.document.body.append(script);
      });
    }
    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
